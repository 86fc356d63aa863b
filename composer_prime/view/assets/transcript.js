// One rollout turn by turn: tools on offer, calls, errors, hints, and tokens colored by what the run recorded.
import { h, figure, seconds, plural } from "./dom.js";

export const SHADES = [["", "no color"], ["logprobs", "log-probability"], ["advantages", "advantage"], ["mismatch", "mismatch"], ["divergence", "divergence"]];
const MOST_NATS = 5;
const SHORT_TOKENS = 4;

export function rolloutCard(rollout, options = {}) {
  const cost = rollout.cost || {};
  const facts = [
    rollout.advantage !== null && rollout.advantage !== undefined && `advantage ${figure(rollout.advantage)}`,
    cost.sampled_tokens && plural(cost.sampled_tokens, "token"),
    cost.wall_s && seconds(cost.wall_s),
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
    tokenStrip(options.tokens || [], options.shade),
    (rollout.turns || []).map((turn, index) => turnBlock(turn, index)),
  );
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

// `shade`: color the turn's own tokens instead of its text, where it has them.
export function turnBlock(turn, index, shade = "") {
  const failed = turn.role === "tool" && turn.error;
  const text = turn.text || "";
  const isShaded = Boolean(shade && turn.tokens);
  const repeats = turn.error && text.trimStart().startsWith(turn.error);
  const jumped = turn.parent !== null && turn.parent !== undefined && turn.parent !== index - 1;
  return h(
    "div",
    { class: `turn ${turn.role} ${failed ? "failed" : ""}` },
    h("div", { class: "who" }, turn.role, turn.token_count ? h("div", { class: "quiet" }, `${turn.token_count} tok`) : "", jumped && h("div", null, `after [${turn.parent}]`)),
    h(
      "div",
      null,
      isShaded && tokenStrip([turn.tokens], shade),
      !isShaded && turn.reasoning && h("details", null, h("summary", null, "reasoning"), h("pre", { class: "plain" }, turn.reasoning)),
      !isShaded && text && h("pre", null, text),
      (turn.tool_calls || []).map((call) => h("pre", { class: "call" }, `${call.name}(${call.arguments})`)),
      turn.error && !repeats && h("div", { class: "fault" }, turn.error),
      turn.finish_reason === "cancelled" && h("div", { class: "quiet small" }, "stopped here"),
      turn.finish_reason === "length" && h("div", { class: "fault" }, "ended at the token limit"),
      turn.surprisal !== null && turn.surprisal !== undefined && surprisalMeter(turn.surprisal),
      turn.hint && h("div", { class: "hint" }, h("b", null, "hint: "), turn.hint),
    ),
  );
}

function surprisalMeter(nats) {
  const bar = h("span", { class: "meter" });
  bar.style.width = `${Math.min(nats / 2, 1) * 90 + 1}px`;
  return h("div", { class: "quiet small", title: "mean of −log p of the sampled tokens" }, bar, `${figure(nats)} nats a token`);
}

export function shadesOf(tokens) {
  return SHADES.filter(([name]) => !name || tokens.some((sample) => Array.isArray(sample[name])));
}

// The value at which the color is strongest, the same for all samples of a rollout.
function strongest(samples, shade) {
  if (shade === "logprobs") return MOST_NATS;
  return Math.max(...samples.flatMap((sample) => (Array.isArray(sample[shade]) ? sample[shade].map(Math.abs) : [])), 1e-9);
}

export function shadeLegend(samples, shade) {
  if (!shade) return null;
  const most = strongest(samples, shade);
  const ends = { logprobs: ["certain", "unlikely"], advantages: ["made rarer", "made likelier"] }[shade] || ["none", "most"];
  const from = shade === "advantages" ? -most : 0;
  const to = shade === "logprobs" ? -most : most;
  const steps = [0, 0.25, 0.5, 0.75, 1].map((part) => from + part * (to - from));
  const swatch = (value) => {
    const span = h("span", null, figure(value));
    span.style.background = color(value, most, shade);
    return span;
  };
  return h("span", { class: "quiet small", id: "shades" }, ends[0], steps.map(swatch), ends[1]);
}

function tokenStrip(samples, shade) {
  if (!samples.length || !shade) return null;
  const most = strongest(samples, shade);
  return samples.map((sample) => {
    const values = sample[shade];
    if (!Array.isArray(values)) return null;
    return h("div", { class: "tokens", "data-shade": shade }, pieces(sample).map(([start, end, sampled]) => {
      if (!sampled) return givenTokens(sample.texts.slice(start, end));
      return sample.texts.slice(start, end).map((text, place) => shadedToken(text, values[start + place], most, shade, sample.mask[start + place]));
    }));
  });
}

// Runs of tokens that the policy sampled, and of those that it was given: [start, end, sampled].
function pieces(sample) {
  const found = [];
  sample.texts.forEach((_, index) => {
    const sampled = Boolean(sample.sampled[index]);
    const last = found[found.length - 1];
    if (last && last[2] === sampled) last[1] = index + 1;
    else found.push([index, index + 1, sampled]);
  });
  return found;
}

function givenTokens(texts) {
  if (texts.length <= SHORT_TOKENS) return h("span", { class: "quiet" }, texts.join(""));
  return h("details", null, h("summary", null, `${texts.length} tokens given`), h("span", { class: "quiet" }, texts.join("")));
}

function shadedToken(text, value, most, shade, trained) {
  const span = h("span", { class: "token", title: `${shade} ${figure(value)}${trained ? "" : ", not trained"}` }, text);
  span.style.background = color(value, most, shade);
  return span;
}

function color(value, most, shade) {
  const strength = Math.min(Math.abs(value) / most, 1) * 0.75;
  const isBlue = shade === "advantages" && value > 0;
  return isBlue ? `rgba(47, 109, 181, ${strength})` : `rgba(214, 96, 20, ${strength})`;
}
