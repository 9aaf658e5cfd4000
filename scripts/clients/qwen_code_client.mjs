// Qwen Code with this server's /v1/chat/completions: it runs commands for the model, ends, and goes on with the session.
import { agent, assert, reused, run, sunny } from "./checks.mjs";

function qwen(url, ...args) {
  const env = { OPENAI_API_KEY: "x", OPENAI_BASE_URL: `${url}/v1`, OPENAI_MODEL: "speaker" };
  // It heeds no NO_PROXY: with a proxy that leads nowhere it reaches nothing.
  for (const name of ["HTTP_PROXY", "HTTPS_PROXY"]) env[name] = "";
  const settings = {
    general: { disableAutoUpdate: true },
    privacy: { usageStatisticsEnabled: false },
    telemetry: { enabled: false },
  };
  const files = { ".qwen/settings.json": JSON.stringify(settings) };
  return agent("qwen", ["--auth-type", "openai", "-y", ...args], { env, files });
}

async function check_qwen_code_runs_commands_and_ends(real, speaker) {
  const share = await reused(speaker, () => sunny(qwen(speaker, "-p", "What is the weather in Bonn? Use a command.")));
  assert.ok(share > 0.6, `${share} of its prompts' tokens were cached`);
}

async function check_qwen_code_goes_on_with_its_session(real, speaker) {
  const share = await reused(speaker, () => sunny(qwen(speaker, "-c", "-p", "And tomorrow?")));
  assert.ok(share > 0.9, `${share} of its prompts' tokens were cached`);
}

await run([check_qwen_code_runs_commands_and_ends, check_qwen_code_goes_on_with_its_session]);
