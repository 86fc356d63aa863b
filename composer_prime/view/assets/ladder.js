// Arms side by side at equal steps: verdicts first, then curves over seeds, then tables of differences.
import { h, plural, section, table } from "./dom.js";
import { lineChart } from "./chart.js";

export function ladderBlocks(data) {
  const names = data.arms.map((arm) => arm.name);
  const curves = Object.entries(data.curves).map(([name, arms]) =>
    lineChart({ title: name, note: "mean over seeds", log: name.endsWith("mismatch_kl"), series: names.map((arm, index) => ({ name: arm, color: index % 8, points: arms[arm], mean: true, plain: true })) }));
  const heldOut = data.held_out.map((each) =>
    lineChart({
      title: `held-out ${each.name}`, note: "95 % over seeds", unit: true,
      series: names.map((arm, index) => ({ name: arm, color: index % 8, points: each.arms[arm].map((point) => [point.step, point.mean]) })),
      intervals: names.flatMap((arm, index) => each.arms[arm].map((point) => ({ x: point.step + index * 0.12, mean: point.mean, low: point.low, high: point.high, color: index % 8 }))),
    }));
  return [
    data.verdicts.length
      ? data.verdicts.map((verdict) => h("p", { class: `verdict ${verdict.tone}` }, h("span", null, verdict.text)))
      : h("p", { class: "verdict open" }, h("span", null, data.arms.length < 2 ? "one arm: nothing to compare" : "no held-out evaluation that all arms have: no verdict")),
    section(`${plural(data.arms.length, "arm")} at ${plural(data.steps, "step")}`, data.arms.map((arm, index) => armBlock(arm, index, names[0]))),
    section("Held-out", h("div", { class: "charts" }, heldOut.filter(Boolean))),
    section("Training", h("div", { class: "charts" }, curves.filter(Boolean))),
    data.tables.map((each) => section(each.title, table([{ title: "Steps" }, ...each.labels.map((title) => ({ title, kind: "n" }))],
      each.rows.map((row) => h("tr", null, h("td", { class: "w" }, row.name), row.cells.map((cell) => h("td", { class: "n" }, cell))))))),
    h("p", { class: "quiet" }, "Intervals are 95 % Student t intervals over seeds; differences are paired by seed."),
  ];
}

function armBlock(arm, index, base) {
  return h("div", null, h("span", { class: `key c${index % 8}` }, h("b", null, arm.name)), h("span", { class: "quiet" }, ` seeds ${arm.seeds.join(", ")}${index ? "" : ", the base of all differences"}`),
    arm.differs.length > 0 && h("details", null, h("summary", null, `${plural(arm.differs.length, "setting")} unlike ${base}`), h("pre", { class: "plain" }, arm.differs.join("\n"))));
}
