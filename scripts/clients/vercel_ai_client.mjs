// Vercel's AI SDK: its provider for compatible servers and its Responses provider, each with a tool loop of two steps.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { assert, run } from "./checks.mjs";

const compatible = (url, options) =>
  createOpenAICompatible({ name: "here", baseURL: `${url}/v1`, apiKey: "x", includeUsage: true, ...options });
const openai = (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "x" });

async function loop(model, providerOptions) {
  const said = [];
  const weather = tool({
    description: "Tells the weather.",
    inputSchema: z.object({ city: z.string(), days: z.number().int() }),
    execute: async (args) => (said.push(args), "sunny"),
  });
  const options = { model, tools: { weather }, stopWhen: stepCountIs(3), prompt: "Weather in Bonn?", maxRetries: 0 };
  const whole = await generateText({ ...options, providerOptions });
  assert.equal(whole.steps.length, 2);
  assert.equal(whole.text, "It will be sunny in Bonn.");
  assert.equal(whole.steps[0].reasoningText?.trim(), "I need the weather.");
  const streamed = streamText({ ...options, providerOptions, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.ok(text.endsWith("It will be sunny in Bonn."), text);
  assert.equal((await streamed.steps).length, 2);
  assert.deepEqual(said, [{ city: "Bonn", days: 2 }, { city: "Bonn", days: 2 }]);
  assert.ok((await streamed.totalUsage).totalTokens > 0);
}

async function check_a_tool_loop_of_two_steps_compatible(real, speaker) {
  await loop(compatible(speaker)("speaker"), {});
}

async function check_a_tool_loop_of_two_steps_responses(real, speaker) {
  // By default the second step names the items of the first; with store: false it sends them.
  await loop(openai(speaker).responses("speaker"), { openai: { reasoningSummary: "auto", forceReasoning: true } });
}

async function check_a_tool_loop_of_two_steps_that_stores_nothing(real, speaker) {
  const options = { store: false, reasoningSummary: "auto", forceReasoning: true };
  await loop(openai(speaker).responses("speaker"), { openai: options });
}

async function check_objects(real) {
  const model = compatible(real, { supportsStructuredOutputs: true })("qwen3-tiny");
  const schema = z.object({ city: z.enum(["Bonn", "Paris"]), days: z.number().int().min(0).max(9) });
  const { object } = await generateObject({
    model,
    schema,
    prompt: "Weather?",
    maxOutputTokens: 200,
    maxRetries: 0,
    providerOptions: { here: { chat_template_kwargs: { enable_thinking: false } } },
  });
  assert.ok(schema.safeParse(object).success);
}

async function check_noise(real) {
  const model = compatible(real)("qwen3-tiny");
  const options = { model, system: "Be short.", prompt: "hi", maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
  const whole = await generateText(options);
  const streamed = streamText(options);
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, whole.text);
  assert.equal(whole.usage.outputTokens, 12);
}

await run([
  check_a_tool_loop_of_two_steps_compatible,
  check_a_tool_loop_of_two_steps_responses,
  check_a_tool_loop_of_two_steps_that_stores_nothing,
  check_objects,
  check_noise,
]);
