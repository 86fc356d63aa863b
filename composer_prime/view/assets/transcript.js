// One rollout turn by turn: tools on offer, calls, errors, hints.
import { h, figure, seconds, plural } from "./dom.js";

export function rolloutCard(rollout, options = {}) {
  const cost = rollout.cost || {};
  const facts = [
    rollout.advantage !== null && rollout.advantage !== undefined && `advantage ${figure(rollout.advantage)}`,
    cost.sampled_tokens && plural(cost.sampled_tokens, "token"),
    cost.wall_s && `${seconds(cost.wall_s)}${timesText(rollout)}`,
    rollout.policy_versions && `version ${[...new Set(rollout.policy_versions)].join("–")}`,
    rollout.stop_reason && rollout.stop_reason.replaceAll("_", " "),
    rollout.truncated && "cut short",
  ].filter(Boolean);
  const parts = Object.entries(rollout.parts || {});
  const named = [...(parts.length > 1 || options.detail ? parts : []), ...(options.detail ? Object.entries(rollout.metrics || {}) : [])];
  return h(
    "article",
    { class: `rollout ${options.current ? "current" : ""}`, "data-rollout": rollout.rollout_id },
    h("header", null, h("b", null, rollout.reward === null || rollout.reward === undefined ? "no reward" : `reward ${figure(rollout.reward)}`),
      h("span", { class: "quiet" }, rollout.rollout_id), h("span", { class: "quiet small" }, facts.join(" · "))),
    named.length > 0 && h("div", null, named.map(([name, value]) => h("span", { class: "chip" }, `${name} `, h("b", null, figure(value))))),
    failureBlock(rollout),
    monitorBlock(rollout),
    options.tools !== false && toolsBlock(rollout.tools || [], options.detail),
    (rollout.turns || []).map((turn, index) => turnBlock(turn, index, options.isColored && turn.tokens)),
  );
}

// Where the wall time of the first agent went. An answer takes the wait in the queue of the nodes and its sampling.
function timesText(rollout) {
  const sampled = (rollout.turns || []).filter((turn) => !turn.session && typeof turn.answered_s === "number").sort((one, other) => one.asked_s - other.asked_s);
  if (!sampled.length) return "";
  const answers = sampled.reduce((sum, turn) => sum + turn.answered_s - turn.asked_s, 0);
  const tools = sampled.slice(1).reduce((sum, turn, index) => sum + Math.max(0, turn.asked_s - sampled[index].answered_s), 0);
  return ` (answers ${seconds(answers)}, tools ${seconds(tools)}, start and scoring ${seconds(Math.max(0, rollout.cost.wall_s - answers - tools))})`;
}

function failureBlock(rollout) {
  const failures = [...(rollout.failed_attempts || []).map((each) => ["an earlier try failed", each]), ...(rollout.error ? [["failed", rollout.error]] : [])];
  return failures.map(([title, failure]) => {
    const text = typeof failure === "string" ? failure : failure.message || failure.kind;
    return h("div", { class: "note bad" }, h("b", null, `${title}: `), text, failure.where && h("div", { class: "quiet" }, failure.where),
      failure.detail && h("details", null, h("summary", null, "traceback"), h("pre", { class: "trace" }, failure.detail)));
  });
}

function monitorBlock(rollout) {
  const verdict = rollout.verdict;
  if (!verdict) return null;
  if (typeof verdict === "string") return h("div", { class: "note" }, h("b", null, `monitor: ${verdict}`));
  const findings = (verdict.findings || []).map((each) => h("li", null, h("b", null, `${each.severity} ${each.rule}`), ` at ${each.place}: `, h("code", null, each.evidence)));
  const left = (verdict.count || 0) - findings.length;
  const title = verdict.hack ? `a reward hack, policy ${verdict.policy}` : findings.length ? "no proof of a hack" : "clean";
  return h("div", { class: `note ${verdict.hack ? "bad" : ""}` }, h("b", null, `monitor: ${title}`), findings.length > 0 && h("ul", null, findings), left > 0 && `and ${plural(left, "finding")} more`);
}

export function signature(tool) {
  const definition = tool.function || tool;
  const schema = definition.parameters || {};
  const required = schema.required || [];
  const parameters = Object.entries(schema.properties || {}).map(([name, each]) => `${name}${required.includes(name) ? "" : "?"}: ${(each && each.type) || "any"}`);
  return `${definition.name}(${parameters.join(", ")})`;
}

export function toolsBlock(tools, open) {
  if (!tools.length) return null;
  return h("details", { open: Boolean(open) }, h("summary", null, `${plural(tools.length, "tool")} on offer`),
    h("pre", { class: "plain" }, tools.map((tool) => `${signature(tool)}   ${((tool.function || tool).description || "").split("\n")[0]}`).join("\n")));
}

// `tokens`: what the policy sampled, to show in place of the text and the calls that were read from it.
export function turnBlock(turn, index, tokens) {
  const failed = turn.role === "tool" && turn.error;
  const text = turn.text || "";
  const repeats = turn.error && text.trimStart().startsWith(turn.error);
  const jumped = turn.parent !== null && turn.parent !== undefined && turn.parent !== index - 1;
  return h(
    "div",
    { class: `turn ${turn.role} ${failed ? "failed" : ""}` },
    h("div", { class: "who" }, turn.role, failed && h("div", null, "failed call"), turn.token_count ? h("div", { class: "quiet" }, `${turn.token_count} tok`) : "", jumped && h("div", null, `after [${turn.parent}]`)),
    h(
      "div",
      null,
      tokens && h("pre", null, tokens.map(tokenMark)),
      !tokens && turn.reasoning && h("details", null, h("summary", null, "reasoning"), h("pre", { class: "plain" }, turn.reasoning)),
      !tokens && text && h("pre", null, text),
      !tokens && (turn.tool_calls || []).map((call) => h("pre", { class: "call" }, `${call.name}(${call.arguments})`)),
      turn.error && !repeats && h("div", { class: "fault" }, turn.error),
      turn.finish_reason === "cancelled" && h("div", { class: "quiet small" }, "stopped here"),
      turn.finish_reason === "length" && h("div", { class: "fault" }, "ended at the token limit"),
      turn.surprisal !== null && turn.surprisal !== undefined && surprisalMeter(turn.surprisal),
      turn.hint && h("div", { class: "hint" }, h("b", null, "hint: "), turn.hint),
    ),
  );
}

const MOST_NATS = 5;

function tokenMark([text, logprob]) {
  const mark = h("span", { class: "token", title: `log p ${figure(logprob)}` }, text);
  mark.style.background = `rgba(214, 96, 20, ${Math.min(-logprob / MOST_NATS, 1) * 0.75})`;
  return mark;
}

function surprisalMeter(nats) {
  const bar = h("span", { class: "meter" });
  bar.style.width = `${Math.min(nats / 2, 1) * 90 + 1}px`;
  return h("div", { class: "quiet small", title: "mean of −log p of the sampled tokens" }, bar, `${figure(nats)} nats a token`);
}
