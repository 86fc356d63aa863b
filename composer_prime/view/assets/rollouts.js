// The list of rollouts with its filters. The filters are the address, so a link shows the same list.
import { h, figure, plural, table, replace } from "./dom.js";
import { ask, link } from "./source.js";

const KINDS = [["step", "Training"], ["eval", "Held-out"], ["failed", "Failed"]];
const FAULTS = [["", "any"], ["failed", "failed"], ["tool", "a failed tool call"], ["any", "failed or a failed call"], ["none", "none"], ["hinted", "got a hint"], ["truncated", "cut short"]];
const SORTS = [["", "newest"], ["reward", "lowest reward"], ["-reward", "highest reward"], ["tokens", "longest"], ["errors", "most failed calls"], ["step", "oldest"]];
const PAGE = 100;

export async function rolloutsPage(run, query, go) {
  const answer = await ask("rollouts", { ...query, run: run.id, limit: PAGE });
  const offset = Number(query.offset || 0);
  const change = (changes) => go(link(["run", run.id, "rollouts"], { ...query, offset: "", ...changes }));
  const list = h("div", { id: "list" });
  replace(list, rolloutTable(run, answer.rows, query));
  const last = Math.min(offset + PAGE, answer.total);
  const turn = (to, text) => h("button", { type: "button", disabled: to < 0 || to >= answer.total, onclick: () => change({ offset: to || "" }) }, text);
  return {
    nodes: [
      filterBar(query, answer.facets, change),
      h("p", { class: "filters" }, h("span", { class: "quiet", id: "count" }, answer.total ? `${offset + 1}–${last} of ${plural(answer.total, "rollout")}` : "no rollout matches"),
        answer.total > PAGE && [turn(offset - PAGE, "Back"), turn(offset + PAGE, "Next")]),
      list,
    ],
  };
}

function filterBar(query, facets, change) {
  const pick = (label, name, values, all = "all") => values.length > 1 || query[name]
    ? h("label", null, label, choice(name, [["", all], ...values.map((value) => [String(value), String(value)])], query[name] || "", change)) : null;
  const kind = query.kind || "step";
  const typed = (name, type, label, props = {}) => h("label", null, label, h("input", { type, id: `filter-${name}`, value: query[name] || "", onchange: (event) => change({ [name]: event.target.value }), ...props }));
  return h(
    "div",
    { class: "filters", role: "search" },
    KINDS.map(([value, title]) => h("button", { type: "button", "aria-pressed": String(kind === value), onclick: () => change({ kind: value === "step" ? "" : value, step: "", group: "", status: "", ...(value === "failed" ? { min: "", max: "" } : {}) }) }, title)),
    typed("q", "search", "find", { id: "search", placeholder: "question, id or error" }),
    pick("step", "step", facets.steps.toReversed()),
    typed("min", "number", "reward from", { step: "any" }),
    typed("max", "number", "to", { step: "any" }),
    h("label", null, "error", choice("error", FAULTS, query.error || "", change)),
    pick("source", "source", facets.sources),
    pick("status", "status", facets.statuses),
    pick("hack verdict", "verdict", facets.verdicts),
    pick("node", "node", facets.nodes),
    h("label", null, "sort", choice("sort", SORTS, query.sort || "", change)),
    query.group && h("button", { type: "button", onclick: () => change({ group: "" }) }, `group ${query.group} ×`),
    query.task && h("button", { type: "button", onclick: () => change({ task: "" }) }, `task ${query.task} ×`),
  );
}

function choice(name, options, value, change) {
  return h("select", { id: `filter-${name}`, onchange: (event) => change({ [name]: event.target.value }) },
    options.map(([each, title]) => h("option", { value: each, selected: each === value }, title)));
}

export function rolloutLink(run, entry) {
  return link(["run", run.id, "rollout", entry.kind, String(entry.step), entry.rollout_id]);
}

export function rolloutTable(run, rows, query) {
  const withVerdict = rows.some((row) => row.verdict !== null);
  const withNode = rows.some((row) => row.node !== null);
  const columns = [{ title: "Step", kind: "n" }, { title: "Rollout" }, { title: "Reward", kind: "n" }, { title: "Advantage", kind: "n wide" }, { title: "Turns", kind: "n wide" },
    { title: "Failed calls", kind: "n wide" }, { title: "Hints", kind: "n wide" }, { title: "Tokens", kind: "n wide" }, { title: "Versions", kind: "n wide" }, withVerdict && { title: "Verdict", kind: "wide" }, withNode && { title: "Node", kind: "wide" }, { title: "Status", kind: "wide" }, { title: "Task" }, { title: "Expected", kind: "wide" }, { title: "Last reply", kind: "wide" }].filter(Boolean);
  const body = rows.map((row) => {
    const href = rolloutLink(run, row);
    const versions = row.version_min === row.version_max ? figure(row.version_min) : `${row.version_min}–${row.version_max}`;
    return h("tr", { "data-href": href },
      h("td", { class: "n" }, row.step), h("td", { class: "w" }, h("a", { href }, row.rollout_id)),
      h("td", { class: "n" }, h("b", null, figure(row.reward))), h("td", { class: "n wide" }, figure(row.advantage)), h("td", { class: "n wide" }, row.turns),
      h("td", { class: "n wide" }, row.tool_errors || ""), h("td", { class: "n wide" }, row.hints || ""), h("td", { class: "n wide" }, figure(row.tokens)), h("td", { class: "n wide" }, versions),
      withVerdict && h("td", { class: "w wide" }, row.verdict), withNode && h("td", { class: "w wide" }, row.node),
      h("td", { class: "w wide" }, row.error ? h("span", { class: "bad" }, "failed") : row.status, row.truncated ? h("span", { class: "quiet" }, ", cut short") : ""),
      h("td", null, h("div", { class: "cut" }, row.question || row.task_id), row.question && h("div", { class: "quiet small" }, row.task_id), row.error && h("div", { class: "bad small" }, row.error)), h("td", { class: "wide" }, h("div", { class: "cut" }, row.expected)), h("td", { class: "wide" }, h("div", { class: "cut" }, row.reply)));
  });
  return table(columns, body, { id: "rollouts" });
}
