// The charts of a run, or of several runs laid over each other, by subject.
import { h, figure, section } from "./dom.js";
import { lineChart } from "./chart.js";

const GROUPS = [
  ["Reward", [
    { title: "Reward", names: ["reward/mean"], mean: true, unit: true, heldOut: true },
    { title: "Turns with an error", names: ["rollout/turn_error_rate", "rollout/tool_error_rate"], mean: true, unit: true },
    { title: "Filtered share", note: "groups whose rewards are all equal", names: ["groups/filtered_share"], mean: true, unit: true },
    { title: "Reward parts", names: ["reward/part/*"], mean: true, several: true },
    { title: "Reward hacks", names: ["hacks/*", "rollout/metric/hacks/*"], mean: true },
  ]],
  ["Policy", [
    { title: "KL to the sampling policy", note: "mismatch, log scale", names: ["policy/mismatch_kl"], mean: true, log: true },
    { title: "Entropy", note: "nats a token", names: ["policy/entropy"], mean: true },
    { title: "Staleness", note: "policy versions", names: ["policy/staleness_max", "policy/staleness_mean"] },
    { title: "Clipped and masked", note: "share of tokens", names: ["policy/clip_fraction", "policy/masked_fraction"], mean: true },
  ]],
  ["Loss terms", [
    { title: "Loss by term", names: ["loss/policy", "loss/sdpo", "loss/replay_dpo"], zero: false },
    { title: "SDPO divergence", note: "nats a token", names: ["sdpo/jsd"], optional: true, mean: true },
    { title: "SDPO turns", note: "a step", names: ["sdpo/turns"], optional: true, mean: true },
    { title: "Pairs preferred as the teachers did", names: ["dpo/accuracy"], mean: true, unit: true },
    { title: "Displacement of chosen answers", note: "nats a token", names: ["dpo/displacement"], optional: true, mean: true },
    { title: "Gradient norm", names: ["optim/grad_norm"], mean: true },
    { title: "Learning rate", names: ["optim/lr"] },
  ]],
  ["Rollouts", [
    { title: "Length", note: "sampled tokens a rollout", names: ["rollout/sampled_tokens_mean"], mean: true },
    { title: "Turns", note: "a rollout", names: ["rollout/turns_mean"], mean: true },
    { title: "Cut short", note: "share of rollouts", names: ["rollout/truncated_share"], mean: true, unit: true },
    { title: "Seconds a rollout", names: ["rollout/wall_s_mean", "rollout/wall_s_max"], mean: true },
  ]],
  ["Time", [
    { title: "Seconds a step", note: "in all, and the largest parts", names: ["time/step_s", "time/wait_s", "time/forward_backward_s", "time/optimizer_s", "time/read_s"] },
    { title: "Trained tokens", note: "a step", names: ["tokens/trained"], mean: true },
    { title: "Trainer memory", note: "bytes at most", names: ["memory/peak_bytes"] },
  ]],
];

// What all charts of the page share: the figure from left to right, and the steps of the bold mean (0: none).
const look = { axis: "step", mean: 10 };
const AXES = { step: ["step", null], tokens: ["trained tokens", (value) => `${figure(value)} tokens`], hours: ["wall clock", (value) => `${figure(value)} h`] };

// The steps of a run on the chosen axis.
function places(run) {
  const { steps, tokens, times } = run.figures;
  if (look.axis === "tokens") return tokens;
  return look.axis === "hours" ? times.map((time) => (time - run.span[0]) / 3600) : steps;
}

function points(run, name) {
  const column = run.figures.columns[name];
  const xs = places(run);
  return column ? column.map((value, index) => [xs[index], value]) : [];
}

function placeOf(run, step) {
  if (look.axis === "step") return step;
  const index = run.figures.steps.findLastIndex((each) => each <= step);
  return index < 0 ? 0 : places(run)[index];
}

// Axis and smoothing of all charts, and their figures as a table.
export function chartControls(runs, redraw) {
  const pick = (label, name, options) => h("label", null, label, h("select", { id: `chart-${name}`, onchange: (event) => { look[name] = name === "mean" ? Number(event.target.value) : event.target.value; redraw(); } },
    options.map(([value, title]) => h("option", { value, selected: value === look[name] }, title))));
  return h("div", { class: "filters" }, pick("left to right", "axis", Object.entries(AXES).map(([name, [title]]) => [name, title])),
    pick("bold mean of", "mean", [[0, "no steps"], [10, "10 steps"], [50, "50 steps"]]),
    h("a", { id: "csv", download: "figures.csv", href: `data:text/csv;charset=utf-8,${encodeURIComponent(csv(runs))}` }, "CSV"));
}

function csv(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.figures.columns)))].sort();
  const rows = runs.flatMap((run) => run.figures.steps.map((step, index) => [JSON.stringify(run.id), step, run.figures.times[index], ...names.map((name) => run.figures.columns[name]?.[index] ?? "")]));
  return [["run", "step", "time", ...names], ...rows].map((row) => row.join(",")).join("\n");
}

function expand(runs, names) {
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.figures.columns)))];
  return names.flatMap((name) =>
    name.endsWith("*") ? all.filter((each) => each.startsWith(name.slice(0, -1))).slice(0, 6) : [name],
  );
}

// One run: a color a figure. Several runs: a color a run, and a chart for each figure.
function figureCharts(runs, spec) {
  const names = expand(runs, spec.names);
  if (spec.several && names.length < 2) return [];
  if (runs.length === 1 || names.length < 2) return [figureChart(runs, spec, names)];
  return names.map((name) => figureChart(runs, { ...spec, title: `${spec.title}: ${seriesName(name)}` }, [name]));
}

function figureChart(runs, spec, names) {
  const isAlone = runs.length === 1;
  const mean = spec.mean && look.mean;
  const series = isAlone
    ? names.map((name, index) => ({ name: spec.heldOut ? "in training" : seriesName(name), color: index, points: points(runs[0], name), mean }))
    : runs.map((run, index) => ({ name: run.id, color: index % 8, points: points(run, names[0] || ""), mean, plain: true }));
  const intervals = spec.heldOut
    ? runs.flatMap((run, index) =>
        run.evaluations.map((each) => ({ x: placeOf(run, each.step), mean: each.level.mean, low: each.level.low, high: each.level.high, color: isAlone ? 1 : index % 8 })),
      )
    : [];
  return lineChart({ ...spec, series, intervals, xText: AXES[look.axis][1] });
}

function seriesName(name) {
  return name.replace(/^(reward\/part|rollout|policy|loss|time|sdpo|dpo)\//, "").replaceAll("_", " ");
}

export function chartGroups(runs) {
  return GROUPS.map(([title, specs]) => {
    const charts = specs.flatMap((spec) => figureCharts(runs, spec)).filter(Boolean);
    return charts.length ? section(title, h("div", { class: "charts" }, charts)) : null;
  });
}

// Any figure of metrics.jsonl by its name.
export function anyFigure(runs, chosen, choose) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.figures.columns)))].sort();
  if (!names.length) return null;
  const picked = [chosen, "loss/total"].find((name) => names.includes(name)) ?? names[0];
  const options = names.map((name) => h("option", { value: name, selected: name === picked }, name));
  const [chart] = figureCharts(runs, { title: picked, names: [picked], mean: true });
  return section(
    "Any figure",
    h("p", { class: "filters" }, h("label", null, "of metrics.jsonl ", h("select", { onchange: (event) => choose(event.target.value), "aria-label": "figure" }, options))),
    h("div", { class: "charts" }, chart || h("p", { class: "quiet" }, "No value yet.")),
  );
}
