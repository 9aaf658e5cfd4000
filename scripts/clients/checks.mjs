// Runs a client's checks: `node X_client.mjs REAL_URL SPEAKER_URL`; what run.py is to the clients in Python.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import path from "node:path";

export { assert };

export const TOOL = {
  type: "function",
  function: {
    name: "weather",
    description: "Tells the weather.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, days: { type: "integer" } },
      required: ["city", "days"],
      additionalProperties: false,
    },
  },
};

export async function run(checks) {
  const name = path.basename(process.argv[1], ".mjs");
  const [real, speaker] = process.argv.slice(2);
  for (const check of checks) {
    await check(real, speaker);
    console.log(`${name}: ${check.name}`);
  }
  console.log(`${name}: ${checks.length} checks passed`);
}

// A coding agent, run to its end in folders of its own. files: path from the home -> text.
export function agent(program, args, { env = {}, files = {} } = {}) {
  const home = path.resolve(`${program}-home`);
  const work = path.resolve(`${program}-work`);
  mkdirSync(work, { recursive: true });
  for (const [name, text] of Object.entries({ ".keep": "", ...files })) {
    mkdirSync(path.dirname(path.join(home, name)), { recursive: true });
    writeFileSync(path.join(home, name), text);
  }
  const done = spawnSync(path.resolve("node_modules/.bin", program), args, {
    cwd: work,
    env: { ...process.env, HOME: home, PWD: work, ...env },
    input: "",
    timeout: 240_000,
    encoding: "utf8",
  });
  const said = done.stdout + done.stderr.slice(-2000);
  assert.equal(done.status, 0, said);
  return { said, stdout: done.stdout, work };
}

// The agent has run the speaker's two commands, and has its last words.
export function sunny({ said, work }) {
  assert.equal(readFileSync(path.join(work, "weather.txt"), "utf8").trim(), "sunny", said);
  assert.match(said, /It will be sunny in Bonn\./);
}

// The part of the prompts' tokens that came from the prefix cache while the action ran.
export async function reused(url, action) {
  const counters = async () => {
    const text = await (await fetch(`${url}/metrics`, { headers: { connection: "close" } })).text();
    return ["hits", "queries"].map((name) => Number(text.match(RegExp(`^vllm:prefix_cache_${name}_total\\S* (\\S+)`, "m"))[1]));
  };
  const before = await counters();
  await action();
  const [hits, queries] = (await counters()).map((count, index) => count - before[index]);
  return hits / queries;
}
