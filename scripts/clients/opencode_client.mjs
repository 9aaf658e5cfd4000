// opencode with all three APIs of this server: it runs commands for the model, ends, and goes on with the session.
import { agent, assert, reused, run, sunny } from "./checks.mjs";

const APIS = { chat: "openai-compatible", messages: "anthropic", responses: "openai" };

function opencode(url, api, ...args) {
  const options = {
    messages: { thinking: { type: "enabled", budgetTokens: 1024 } },
    responses: { include: ["reasoning.encrypted_content"], store: false },
  };
  const model = { name: "speaker", tool_call: true, reasoning: true, options: options[api] ?? {} };
  const config = {
    autoupdate: false,
    share: "disabled",
    model: `${api}/speaker`,
    small_model: `${api}/speaker`,
    permission: { bash: "allow" },
    provider: {
      [api]: {
        npm: `@ai-sdk/${APIS[api]}`,
        name: api,
        options: { baseURL: `${url}/v1`, apiKey: "x" },
        models: { speaker: { ...model, limit: { context: 200_000, output: 8000 } } },
      },
    },
  };
  const files = { ".config/opencode/opencode.json": JSON.stringify(config) };
  return agent("opencode", ["run", ...args], { files });
}

const checks = Object.keys(APIS).map((api) => {
  const check = async (real, speaker) => {
    const share = await reused(speaker, () => {
      sunny(opencode(speaker, api, "What is the weather in Bonn? Use a command."));
      sunny(opencode(speaker, api, "-c", "And tomorrow?"));
    });
    assert.ok(share > 0.7, `${share} of its prompts' tokens were cached`);
  };
  return Object.defineProperty(check, "name", { value: `check_opencode_works_through_${api}` });
});

await run(checks);
