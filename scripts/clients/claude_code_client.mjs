// Claude Code with this server's /v1/messages: it runs commands for the model, ends, and goes on with the session.
import { agent, assert, reused, run, sunny } from "./checks.mjs";

function claude(url, ...args) {
  const flags = ["--dangerously-skip-permissions", "--output-format", "json"];
  const env = {
    ANTHROPIC_BASE_URL: url,
    ANTHROPIC_AUTH_TOKEN: "x",
    ANTHROPIC_MODEL: "speaker",
    ANTHROPIC_DEFAULT_HAIKU_MODEL: "speaker",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    DISABLE_AUTOUPDATER: "1",
    IS_SANDBOX: "1", // it may run commands as root
  };
  return agent("claude", [...args, ...flags], { env });
}

async function check_claude_code_runs_commands_and_ends(real, speaker) {
  const share = await reused(speaker, () => {
    const done = claude(speaker, "-p", "What is the weather in Bonn? Use a command.");
    sunny(done);
    assert.equal(JSON.parse(done.stdout).num_turns, 3);
  });
  assert.ok(share > 0.6, `${share} of its prompts' tokens were cached`);
}

async function check_claude_code_goes_on_with_its_session(real, speaker) {
  const share = await reused(speaker, () => sunny(claude(speaker, "-c", "-p", "And tomorrow?")));
  assert.ok(share > 0.9, `${share} of its prompts' tokens were cached`);
}

async function check_a_new_session_reuses_the_system_prompt(real, speaker) {
  const share = await reused(speaker, () => sunny(claude(speaker, "-p", "Another session: the weather?")));
  assert.ok(share > 0.9, `${share} of its prompts' tokens were cached`);
}

await run([
  check_claude_code_runs_commands_and_ends,
  check_claude_code_goes_on_with_its_session,
  check_a_new_session_reuses_the_system_prompt,
]);
