// One run: the verdict first, then charts, events, money and settings.
import { h, bytes, clock, dollars, figure, interval, plural, seconds, section, short, table } from "./dom.js";
import { chartControls, chartGroups, anyFigure } from "./figures.js";
import { link } from "./source.js";

export const TABS = [["", "Overview"], ["rollouts", "Rollouts"], ["evaluation", "Evaluations"], ["costs", "Costs"], ["settings", "Settings"], ["clusters", "Clusters"]];

export function runHead(run, tab) {
  const has = { clusters: run.joint || run.joint_rounds.length };
  const tabs = TABS.filter(([name]) => !(name in has) || has[name]);
  return [
    h("h1", null, run.id, " ", h("span", { class: "quiet small" }, run.folder)),
    h("nav", { class: "tabs", "aria-label": "parts of the run" }, tabs.map(([name, title]) =>
      h("a", { href: link(["run", run.id, ...(name ? [name] : [])]), "aria-current": name === tab && "page" }, title))),
  ];
}

export function overview(run, state, redraw) {
  return [
    verdictBlock(run),
    runFacts(run),
    waitingNotes(run),
    problemNotes(run),
    run.figures.steps.length > 0 && chartControls([run], redraw),
    chartGroups([run]),
    nodesBlock(run),
    anyFigure([run], state.figure, (name) => { state.figure = name; redraw(); }),
    eventLog(run),
  ];
}

export function verdictBlock(run) {
  return h("p", { class: `verdict ${run.verdict.tone}` }, h("span", null, run.verdict.text));
}

export function runFacts(run) {
  const { columns } = run.figures;
  const last = (name) => columns[name]?.findLast((value) => value !== null);
  const ended = run.evaluations.length ? run.evaluations[run.evaluations.length - 1] : null;
  const facts = [
    ["state", h("span", { class: `state ${run.state}` }, run.state)],
    ["step", run.max_steps ? `${run.step} of ${run.max_steps}` : run.step],
    ended && ["held-out", `${short(ended.level.mean)}${interval(ended.level.low, ended.level.high)} after step ${ended.step}`],
    last("reward/mean") !== undefined && ["last step's reward", figure(last("reward/mean"))],
    run.span && ["time", seconds(run.span[1] - run.span[0])],
    run.trained_tokens > 0 && ["trained tokens", run.trained_tokens.toLocaleString("en-US")],
    paid(run.costs) > 0 && ["paid", dollars(paid(run.costs))],
  ];
  return h("dl", { class: "facts" }, facts.filter(Boolean).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

function waitingNotes(run) {
  if (run.state !== "running") return null;
  return Object.entries(run.waiting).map(([role, what]) => h("p", { class: "note" }, h("b", null, role), ` waits for ${what}`));
}

// What the headline of a failed run says already is left out.
function problemNotes(run) {
  const isSaid = (event) => run.state === "failed" && [event.text, event.cause].some((text) => text && run.verdict.text.includes(text.split("\n")[0]));
  const problems = run.events.filter((event) => ["problem", "error", "warning", "failure"].includes(event.kind) && !isSaid(event)).slice(-4);
  return problems.map((event) => h("p", { class: "note bad" }, h("b", null, `${event.kind} `), event.text, event.where && h("span", { class: "quiet" }, ` (${event.where})`)));
}

export function eventLog(run) {
  if (!run.events.length) return null;
  const rows = run.events.toReversed().map((event) =>
    h("li", { class: event.kind }, h("span", { class: "quiet" }, clock(event.time)), h("span", { class: "quiet" }, event.step === null || event.step === undefined ? event.role : `step ${event.step}`),
      h("span", { class: event.kind }, event.text, event.where && h("span", { class: "quiet" }, ` (${event.where})`))));
  return section("Events", h("ul", { class: "log scroll", id: "events" }, rows));
}

export function paid(costs) {
  return (costs.teacher_usd || 0) + (costs.hint_usd || 0) + (costs.machine_usd || 0) + (costs.node_usd || 0);
}

// What each inference node did and cost. Device and price are what the node says.
export function nodesBlock(run) {
  if (!run.nodes.length) return null;
  const rate = (value) => (value === null ? "–" : figure(value));
  const money = (value) => (value === null ? "–" : dollars(value));
  const rows = run.nodes.map((node) => {
    const { totals } = node;
    const figures = [seconds(totals.seconds), rate(node.tokens_per_s), rate(node.trained_tokens_per_s), totals.trained_tokens.toLocaleString("en-US"), money(node.usd_per_hour), money(totals.usd), money(node.usd_per_million), bytes(totals.weight_bytes), totals.failures];
    return h("tr", null, h("td", { class: "w" }, node.name), h("td", null, node.state), h("td", null, node.device || "–"), h("td", null, node.engine || "–"), figures.map((text) => h("td", { class: "n" }, text)));
  });
  const words = ["Node", "State", "Device", "Engine"].map((title) => ({ title }));
  const numbers = ["Connected", "Tokens/s", "Trained/s", "Trained tokens", "$/h", "Paid", "$/M trained", "Weights pulled", "Failures"].map((title) => ({ title, kind: "n" }));
  return section("Inference nodes", table([...words, ...numbers], rows, { id: "nodes" }));
}

export function costsBlock(run) {
  const costs = run.costs;
  if (costs.problem) return h("p", { class: "note bad" }, costs.problem);
  const rows = [
    ...Object.entries(costs.by_teacher).map(([name, usd]) => [`teacher ${name}`, dollars(usd)]),
    costs.teacher_calls > 0 && ["teachers in all", `${dollars(costs.teacher_usd)} in ${plural(costs.teacher_calls, "call")}, ${costs.failed_calls} failed`],
    costs.hint_calls > 0 && ["hints", `${dollars(costs.hint_usd)} in ${plural(costs.hint_calls, "call")}`],
    ...Object.entries(costs.seconds_by_role).map(([role, time]) => [`process ${role}`, seconds(time)]),
    costs.gpu_s > 0 && ["GPUs", seconds(costs.gpu_s)],
    costs.machine_usd > 0 && ["machine", dollars(costs.machine_usd)],
    costs.node_usd > 0 && ["nodes", dollars(costs.node_usd)],
    ...Object.entries(costs.bytes_by_link).map(([name, count]) => [`link ${name}`, bytes(count)]),
  ].filter(Boolean);
  if (!rows.length) return h("p", { class: "quiet" }, "Costs are written when the launcher ends.");
  return table([{ title: "What" }, { title: "Used", kind: "n" }], rows.map(([name, value]) => h("tr", null, h("td", null, name), h("td", { class: "n" }, value))), { id: "costs" });
}

export function settingsBlock(run) {
  const rows = ([name, value]) => h("tr", null, h("td", null, name), h("td", null, typeof value === "string" ? value : JSON.stringify(value)));
  const columns = [{ title: "Setting" }, { title: "Value" }];
  const isSet = ([name]) => run.changed.includes(name);
  const all = Object.entries(run.settings);
  const others = all.filter((each) => !isSet(each));
  return [
    h("h3", null, "Changed from the default"), table(columns, all.filter(isSet).map(rows), { id: "settings" }),
    h("details", null, h("summary", null, `${plural(others.length, "setting")} at the default`), table(columns, others.map(rows))),
  ];
}

export function environmentBlock(run) {
  const rows = Object.entries(run.environment).map(([name, value]) => h("tr", null, h("td", { class: "w" }, name), h("td", null, Array.isArray(value) ? value.join(", ") : String(value))));
  return rows.length ? table([{ title: "Machine and packages" }, { title: "" }], rows) : h("p", { class: "quiet" }, "This run recorded no environment.json.");
}
