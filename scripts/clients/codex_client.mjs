// OpenAI's Codex CLI, told to use this server's /v1/responses: it runs a command for the model and reads its answer.
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import path from "node:path";
import { assert, run } from "./checks.mjs";

function codex(url, model, prompt) {
  const home = path.resolve("codex-home");
  const work = path.resolve("codex-work");
  for (const folder of [home, work]) mkdirSync(folder, { recursive: true });
  const provider = `[model_providers.here]\nname = "here"\nbase_url = "${url}/v1"\nwire_api = "responses"\n`;
  writeFileSync(path.join(home, "config.toml"), `model = "${model}"\nmodel_provider = "here"\n${provider}`);
  const flags = ["exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox", "-C", work];
  const done = spawnSync(path.resolve("node_modules/.bin/codex"), [...flags, prompt], {
    env: { ...process.env, CODEX_HOME: home },
    input: "",
    timeout: 120_000,
    encoding: "utf8",
  });
  const events = done.stdout.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  return { done, events, work };
}

async function check_codex_runs_a_command_and_ends(real, speaker) {
  const { done, events, work } = codex(speaker, "speaker", "Weather?");
  assert.equal(done.status, 0, done.stdout.slice(-2000) + done.stderr.slice(-2000));
  assert.ok(existsSync(path.join(work, "weather.txt")), done.stdout.slice(-2000));
  assert.equal(readFileSync(path.join(work, "weather.txt"), "utf8").trim(), "sunny");
  const said = events.filter((event) => event.item?.type === "agent_message").map((event) => event.item.text);
  assert.equal(said.at(-1), "It will be sunny in Bonn.");
}

await run([check_codex_runs_a_command_and_ends]);
