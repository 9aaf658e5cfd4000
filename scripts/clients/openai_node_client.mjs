// openai-node: OpenAI's official client for JavaScript, on both of its APIs.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { assert, run, TOOL } from "./checks.mjs";

const ASK = [{ role: "user", content: "Weather in Bonn?" }];
const client = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "x", maxRetries: 0 });

async function check_noise_streams_as_it_comes(real) {
  const options = { model: "qwen3-tiny", messages: ASK, max_completion_tokens: 24, temperature: 0 };
  const whole = await client(real).chat.completions.create(options);
  let text = "";
  for await (const chunk of await client(real).chat.completions.create({ ...options, stream: true }))
    text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(whole.choices[0].message.refusal, null);
}

async function check_a_developer_and_an_effort(real) {
  const messages = [{ role: "developer", content: "Be short." }, ...ASK];
  for (const reasoning_effort of ["none", "minimal", "low", "medium", "high"])
    await client(real).chat.completions.create({ model: "qwen3-tiny", messages, reasoning_effort, max_tokens: 4 });
}

async function check_a_tools_round(real, speaker) {
  const said = [];
  const runner = client(speaker).chat.completions.runTools({
    model: "speaker",
    messages: ASK,
    tools: [
      {
        type: "function",
        function: { ...TOOL.function, parse: JSON.parse, function: (args) => (said.push(args), "sunny") },
      },
    ],
    stream: true,
  });
  assert.equal(await runner.finalContent(), "It will be sunny in Bonn.");
  assert.deepEqual(said, [{ city: "Bonn", days: 2 }]);
}

async function check_responses(real, speaker) {
  const options = { model: "speaker", input: "hi", reasoning: { summary: "auto" } };
  const answer = await client(speaker).responses.create(options);
  assert.equal(answer.output_text, "Hello there, friend.");
  const final = await client(speaker).responses.stream(options).finalResponse();
  assert.equal(final.output_text, answer.output_text);
  assert.equal(final.output[0].summary[0].text, "hm");
}

async function check_typed_answers(real) {
  const Answer = z.object({ city: z.enum(["Bonn", "Paris"]), days: z.number().int().min(0).max(9) });
  const answer = await client(real).chat.completions.parse({
    model: "qwen3-tiny",
    messages: ASK,
    max_tokens: 200,
    response_format: zodResponseFormat(Answer, "answer"),
    chat_template_kwargs: { enable_thinking: false },
  });
  assert.ok(["Bonn", "Paris"].includes(answer.choices[0].message.parsed.city));
}

async function check_refusals_are_typed(real) {
  const options = { model: "other", messages: ASK };
  await assert.rejects(client(real).chat.completions.create(options), OpenAI.NotFoundError);
  options.model = "qwen3-tiny";
  options.max_tokens = 10 ** 6;
  await assert.rejects(client(real).chat.completions.create(options), OpenAI.BadRequestError);
}

await run([
  check_noise_streams_as_it_comes,
  check_a_developer_and_an_effort,
  check_a_tools_round,
  check_responses,
  check_typed_answers,
  check_refusals_are_typed,
]);
