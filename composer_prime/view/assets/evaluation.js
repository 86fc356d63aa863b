// Which held-out tasks training fixed, and which it broke.
import { h, interval, plural, section, short, table } from "./dom.js";
import { link } from "./source.js";

export function evaluationBlock(run, answer, go) {
  if (answer.steps.length < 2) {
    return h("p", { class: "quiet" }, `${plural(answer.steps.length, "evaluation")}: two are needed to compare. Set orchestrator.eval.every_steps and a source's eval_taskset.`);
  }
  const choose = (name) => go && h("select", { id: `eval-${name}`, "aria-label": `evaluation ${name}`, onchange: (event) => go(link(["run", run.id, "evaluation"], { before: answer.before, after: answer.after, [name]: event.target.value })) },
    answer.steps.map((step) => h("option", { value: step, selected: step === answer[name] }, `after step ${step}`)));
  const change = answer.change;
  const counts = [["fixed", "good"], ["broken", "bad"], ["solved", ""], ["unsolved", ""]];
  return [
    go && h("p", { class: "filters" }, choose("before"), "→", choose("after")),
    change && h("p", null, `held-out ${short(answer.first.mean)}${interval(answer.first.low, answer.first.high)} → ${short(answer.second.mean)}${interval(answer.second.low, answer.second.high)}, change `,
      h("b", null, `${short(change.mean, true)}${interval(change.low, change.high, true)}`), ` over ${plural(change.count, "task")}`),
    h("p", { class: "quiet" }, counts.map(([name, tone], index) => [index ? " · " : "", h("span", { class: tone }, `${answer[`${name}_count`]} ${NAMES[name]}`)]), `. A task is solved from a mean reward of ${answer.threshold}.`),
    h("div", { class: "two" }, section("Fixed by training", flips(run, answer, answer.fixed, "fixed", go)), section("Broken by training", flips(run, answer, answer.broken, "broken", go))),
  ];
}

const FEW = 10;
const NAMES = { fixed: "fixed", broken: "broken", solved: "solved both times", unsolved: "solved neither time" };

function flips(run, answer, rows, id, go) {
  if (!rows.length) return h("p", { class: "quiet" }, "None.");
  const body = rows.map((row) => {
    const task = taskName(row.task);
    const href = link(["run", run.id, "flip"], { task, before: answer.before, after: answer.after });
    return h("tr", go ? { "data-href": href } : {}, h("td", null, h("div", { class: "cut" }, go ? h("a", { href }, row.question || task) : row.question || task), h("div", { class: "quiet small" }, task)), h("td", null, h("div", { class: "cut" }, row.expected)), h("td", null, h("div", { class: "cut" }, row.reply)), h("td", { class: "n" }, short(row.before)), h("td", { class: "n" }, short(row.after)));
  });
  const columns = [{ title: "Task" }, { title: "Expected" }, { title: "Last reply" }, { title: "Before", kind: "n" }, { title: "After", kind: "n" }];
  if (go || body.length <= FEW) return table(columns, body, { id });
  return [table(columns, body.slice(0, FEW), { id }), h("details", null, h("summary", null, `${body.length - FEW} more`), table(columns, body.slice(FEW)))];
}

// "source/task id" without the source; some ids begin with the source themselves.
export function taskName(task) {
  return task.slice(task.indexOf("/") + 1);
}
