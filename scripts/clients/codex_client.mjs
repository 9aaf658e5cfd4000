// OpenAI's Codex CLI with this server's /v1/responses: it runs commands and a tool of an MCP server (this file, run with
// `mcp`) for the model, ends, and goes on with the session.
import path from "node:path";
import { createInterface } from "node:readline";
import { agent, assert, reused, run, sunny } from "./checks.mjs";

function codex(url, ...args) {
  const home = path.resolve("codex-home");
  const config = `model = "speaker"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "${url}/v1"
wire_api = "responses"
[mcp_servers.w]
command = "node"
args = ["${path.resolve("codex_client.mjs")}", "mcp"]
`;
  const flags = ["--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"];
  const done = agent("codex", ["exec", ...args, ...flags], {
    env: { CODEX_HOME: home },
    files: { "config.toml": config },
  });
  const events = done.stdout.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  return { ...done, items: events.filter((event) => event.type === "item.completed").map((event) => event.item) };
}

async function check_codex_runs_commands_and_ends(real, speaker) {
  const share = await reused(speaker, () => {
    const done = codex(speaker, "Weather?");
    sunny(done);
    const called = done.items.find((item) => item.type === "mcp_tool_call");
    assert.equal(called?.status, "completed", done.said);
    assert.match(JSON.stringify(called.result), /sunny in Bonn, says MCP/);
    const said = done.items.filter((item) => item.type === "agent_message").map((item) => item.text);
    assert.equal(said.at(-1), "It will be sunny in Bonn.");
  });
  assert.ok(share > 0.6, `${share} of its prompts' tokens were cached`);
}

async function check_codex_goes_on_with_its_session(real, speaker) {
  const share = await reused(speaker, () => sunny(codex(speaker, "resume", "--last", "And tomorrow?")));
  assert.ok(share > 0.9, `${share} of its prompts' tokens were cached`);
}

// An MCP server with one tool, over standard input and output.
function mcp() {
  const tool = {
    name: "weather",
    description: "Tells the weather.",
    inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  };
  const answers = {
    initialize: ({ protocolVersion }) => ({
      protocolVersion,
      capabilities: { tools: {} },
      serverInfo: { name: "w", version: "1" },
    }),
    "tools/list": () => ({ tools: [tool] }),
    "tools/call": (params) => ({ content: [{ type: "text", text: `sunny in ${params.arguments.city}, says MCP` }] }),
  };
  createInterface({ input: process.stdin }).on("line", (line) => {
    const { id, method, params } = JSON.parse(line);
    if (id === undefined) return;
    const result = answers[method]?.(params) ?? {};
    process.stdout.write(`${JSON.stringify({ jsonrpc: "2.0", id, result })}\n`);
  });
}

if (process.argv[2] === "mcp") mcp();
else await run([check_codex_runs_commands_and_ends, check_codex_goes_on_with_its_session]);
