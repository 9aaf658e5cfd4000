// Runs a client's checks: `node X_client.mjs REAL_URL SPEAKER_URL`; what run.py is to the clients in Python.
import assert from "node:assert/strict";
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
