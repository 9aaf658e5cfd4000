// Markdown as a tree of nodes. A node is a string, or [tag, attributes, ...children] with a tag of this file.
// HTML in the text stays text, and no image is fetched. A parser for answers that may not be complete yet.
"use strict";

const MAX_DEPTH = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)[^\s<>"]+$/i;
const MAX_LINK = 2048;
const MARKS = ["***", "___", "**", "__", "~~", "*", "_"];
const TAGS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };
const TARGET = /^ *((?:[^\s()]|\([^\s()]*\))+)(?: +"[^"]*")? *\)/;
const BARE_LINK = /^https?:\/\/[^\s<>"`*]+/i;

/** The blocks of a text. */
function markdown(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [node, next] = block(lines, at, depth);
    found.push(node);
    at = next;
  }
  return found;
}

/** The block that begins at a line, and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(heading[1].length + 2, 6), text = (heading[2] ?? "").replace(/ +#+ *$/, "");
    return [[`h${level}`, {}, ...inline(text)], at + 1];
  }
  if (RULE.test(line)) return [["hr", {}], at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
  return [["p", {}, ...inline(lines.slice(at, end).map(one => one.trimStart()).join("\n"))], end];
}

/** Whether a line ends the paragraph before it. */
function begins(lines, at) {
  const line = lines[at], item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, at)
    || (item !== null && item[0].length < line.length && !/^(?!1[.)])\d/.test(item[2]));
}

function code(lines, at, [, mark, language]) {
  const body = [];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) break;
    body.push(lines[end]);
  }
  return [["pre", language ? { "data-language": language } : {}, ["code", {}, body.join("\n")]], end + 1];
}

function quote(lines, at, depth) {
  const body = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end += 1) body.push(lines[end].replace(QUOTE, ""));
  return [["blockquote", {}, ...blocks(body, depth + 1)], end];
}

const indent = line => line.length - line.trimStart().length;

function list(lines, at, depth) {
  const [, lead, mark] = ITEM.exec(lines[at]), ordered = /\d/.test(mark), items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > lead.length + 1 || /\d/.test(item[2]) !== ordered || RULE.test(lines[end])) break;
    const body = [lines[end].slice(item[0].length)], edge = item[1].length + 2;
    for (end += 1; end < lines.length; end += 1) {
      const line = lines[end];
      // A blank line belongs to the item if more of the item follows.
      const outside = line.trim()
        ? indent(line) < edge && (ITEM.test(line) || begins(lines, end)) : indent(lines[end + 1] ?? "") < edge;
      if (outside) break;
      body.push(line.slice(Math.min(indent(line), item[0].length)));
    }
    while (end < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1] ?? "")) end += 1;
    const [first, ...rest] = blocks(body, depth + 1);
    items.push(["li", {}, ...(first?.[0] === "p" ? first.slice(2) : first ? [first] : []), ...rest]);
  }
  const start = parseInt(mark, 10);
  return [[ordered ? "ol" : "ul", ordered && start !== 1 ? { start: String(start) } : {}, ...items], end];
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const edges = cells(lines[at + 1]);
  return edges.every(edge => /^:?-+:?$/.test(edge)) && edges.length === cells(lines[at]).length;
}

function table(lines, at) {
  const sides = cells(lines[at + 1]).map(edge => edge.endsWith(":") ? (edge.startsWith(":") ? "center" : "right") : "");
  const row = (tag, line) => ["tr", {}, ...cells(line).slice(0, sides.length).map((cell, column) =>
    [tag, sides[column] ? { class: sides[column] } : {}, ...inline(cell)])];
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) rows.push(row("td", lines[end]));
  return [["table", {}, ["thead", {}, row("th", lines[at])], ["tbody", {}, ...rows]], end];
}

/** The nodes of a text within a block. */
function inline(text, depth = 0) {
  const nodes = [], places = new Map(), special = /[\\`*_~[!<h]/g;
  let plain = 0;
  for (let match; (match = special.exec(text));) {
    const found = span(text, match.index, depth, places);
    if (!found) continue;
    if (match.index > plain) nodes.push(text.slice(plain, match.index));
    nodes.push(...found.slice(1));
    plain = special.lastIndex = found[0];
  }
  if (plain < text.length) nodes.push(text.slice(plain));
  return nodes;
}

/** What begins at a character: where it ends, and its nodes; null for plain text. */
function span(text, at, depth, places) {
  const char = text[at], next = text[at + 1] ?? "";
  if (char === "\\") return /[!-/:-@[-`{-~]/.test(next) ? [at + 2, next] : null;
  if (char === "`") return codeSpan(text, at, places);
  if (char === "h" || char === "<") return bareLink(text, at);
  if (depth >= MAX_DEPTH) return null;
  if (char === "[") return namedLink(text, at, at + 1, depth, places);
  if (char === "!") return next === "[" ? namedLink(text, at, at + 2, depth, places) : null;
  return emphasis(text, at, depth, places);
}

/** Where a mark comes next, -1 for nowhere. `places` keeps it, so that no part of a text is searched twice. */
function find(text, mark, from, places) {
  const known = places.get(mark);
  if (known !== undefined && (known < 0 || known >= from)) return known;
  const alone = mark === "*" || mark === "_" || mark[0] === "`"; // not a part of a longer run
  let place = text.indexOf(mark, from);
  while (alone && place >= 0 && (text[place + mark.length] === mark[0] || text[place - 1] === mark[0])) {
    while (text[place] === mark[0]) place += 1;
    place = text.indexOf(mark, place);
  }
  places.set(mark, place);
  return place;
}

function codeSpan(text, at, places) {
  let from = at;
  while (text[from] === "`") from += 1;
  const mark = text.slice(at, from), end = find(text, mark, from, places);
  return end < 0 ? [from, mark] : [end + mark.length, ["code", {}, text.slice(from, end)]];
}

function bareLink(text, at) {
  const bracket = text[at] === "<", from = bracket ? at + 1 : at;
  if (!bracket && /\w/.test(text[at - 1] ?? "")) return null;
  let url = BARE_LINK.exec(text.slice(from, from + MAX_LINK))?.[0];
  if (!url || (bracket && text[from + url.length] !== ">")) return null;
  if (!bracket) url = url.replace(/[.,;:!?)\]}']+$/, "");
  return [from + url.length + (bracket ? 1 : 0), link(url, [url])];
}

function namedLink(text, at, from, depth, places) {
  const middle = find(text, "](", from, places);
  const target = middle < 0 ? null : TARGET.exec(text.slice(middle + 2, middle + MAX_LINK));
  if (!target || middle - from > MAX_LINK || !SAFE_LINK.test(target[1])) return null;
  return [middle + 2 + target[0].length, link(target[1], inline(text.slice(from, middle), depth + 1))];
}

function link(url, children) {
  return ["a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children];
}

function emphasis(text, at, depth, places) {
  const mark = MARKS.find(one => text.startsWith(one, at));
  if (mark === undefined) return null;
  const from = at + mark.length, word = place => /\w/.test(text[place] ?? "");
  if (/^\s?$/.test(text[from] ?? "") || (mark[0] === "_" && word(at - 1))) return [from, mark];
  let end = find(text, mark, from, places);
  while (mark.length === 2 && end >= 0 && text[end + 2] === mark[0]) end += 1; // of three, the last two
  if (end <= from || /\s/.test(text[end - 1]) || (mark[0] === "_" && word(end + mark.length))) return [from, mark];
  const children = inline(text.slice(from, end), depth + 1);
  const node = mark.length === 3 ? ["strong", {}, ["em", {}, ...children]] : [TAGS[mark], {}, ...children];
  return [end + mark.length, node];
}
