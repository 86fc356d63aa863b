// The charts of a run, or of several runs laid over each other, by subject.
import { h, section } from "./dom.js";
import { lineChart, stackedBars } from "./chart.js";

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
    { title: "SDPO divergence", note: "nats a token", names: ["sdpo/jsd", "sdpo/turn_jsd"], optional: true, mean: true },
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
];

const TIME = [
  ["waiting for a batch", "time/wait_s", 3],
  ["reading", "time/read_s", 4],
  ["forward and backward", "time/forward_backward_s", 0],
  ["optimizer", "time/optimizer_s", 2],
];

function points(run, name) {
  const column = run.figures.columns[name];
  return column ? run.figures.steps.map((step, index) => [step, column[index]]) : [];
}

function expand(runs, names) {
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.figures.columns)))];
  return names.flatMap((name) =>
    name.endsWith("*") ? all.filter((each) => each.startsWith(name.slice(0, -1))).slice(0, 6) : [name],
  );
}

// One run: a color a figure. Several runs: a color a run, only the first figure.
function figureChart(runs, spec) {
  const names = expand(runs, spec.names);
  if (spec.several && names.length < 2) return null;
  const isAlone = runs.length === 1;
  const series = isAlone
    ? names.map((name, index) => ({ name: spec.heldOut ? "in training" : seriesName(name), color: index, points: points(runs[0], name), mean: spec.mean }))
    : runs.map((run, index) => ({ name: run.id, color: index % 8, points: points(run, names[0] || ""), mean: spec.mean, plain: true }));
  const intervals = spec.heldOut
    ? runs.flatMap((run, index) =>
        run.evaluations.map((each) => ({ x: each.step, mean: each.level.mean, low: each.level.low, high: each.level.high, color: isAlone ? 1 : index % 8 })),
      )
    : [];
  return lineChart({ ...spec, series, intervals });
}

function seriesName(name) {
  return name.replace(/^(reward\/part|rollout|policy|loss|time|sdpo|dpo)\//, "").replaceAll("_", " ");
}

export function chartGroups(runs) {
  return GROUPS.map(([title, specs]) => {
    const charts = specs.map((spec) => figureChart(runs, spec)).filter(Boolean);
    return charts.length ? section(title, h("div", { class: "charts" }, charts)) : null;
  });
}

export function timeCharts(run) {
  const { steps, columns } = run.figures;
  const charts = [];
  const whole = columns["time/step_s"];
  if (whole) {
    const parts = TIME.filter(([, name]) => columns[name]).map(([name, key, color]) => ({ name, color, values: columns[key] }));
    const rest = whole.map((value, index) => Math.max(0, (value || 0) - parts.reduce((sum, part) => sum + (part.values[index] || 0), 0)));
    parts.push({ name: "the rest", color: 7, values: rest });
    charts.push(stackedBars({ title: "Where the time goes", note: "seconds a step", steps, parts }));
    const rate = steps.map((step, index) => {
      const tokens = columns["tokens/trained"]?.[index];
      return [step, tokens && whole[index] ? tokens / whole[index] : null];
    });
    charts.push(lineChart({ title: "Trained tokens a second", note: "waiting included", series: [{ name: "tokens/s", points: rate, mean: true }] }));
  }
  const memory = points(run, "memory/peak_bytes").map(([step, value]) => [step, value === null ? null : value / 2 ** 30]);
  charts.push(lineChart({ title: "Trainer memory", note: "GiB at most", series: [{ name: "GiB", points: memory }] }));
  const usable = charts.filter(Boolean);
  return usable.length ? section("Time", h("div", { class: "charts" }, usable)) : null;
}

// Any figure of metrics.jsonl by its name.
export function anyFigure(runs, chosen, choose) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.figures.columns)))].sort();
  if (!names.length) return null;
  const picked = names.includes(chosen) ? chosen : names[0];
  const options = names.map((name) => h("option", { value: name, selected: name === picked }, name));
  const chart = figureChart(runs, { title: picked, names: [picked], mean: true });
  return section(
    "Any figure",
    h("p", { class: "filters" }, h("label", null, "of metrics.jsonl ", h("select", { onchange: (event) => choose(event.target.value), "aria-label": "figure" }, options))),
    h("div", { class: "charts" }, chart || h("p", { class: "quiet" }, "No value yet.")),
  );
}
