// A rollout among its siblings, alone or side by side.
import { h, figure } from "./dom.js";
import { ask, link } from "./source.js";
import { rolloutCard } from "./transcript.js";
import { rolloutLink } from "./rollouts.js";

export async function rolloutPage(run, [kind, step, id], state, redraw) {
  const page = await ask("rollout", { run: run.id, kind, step, id });
  const { entry, rollout, siblings } = page;
  const chosen = state.sideBySide ? siblings.map((each) => each.rollout) : [rollout];
  const rewards = siblings.map((each) => each.entry.reward);
  const isEqual = siblings.length > 1 && new Set(rewards).size === 1;
  const cards = chosen.map((each) =>
    rolloutCard(each, {
      current: state.sideBySide && each.rollout_id === id,
      detail: !state.sideBySide,
      isColored: !state.sideBySide && state.isColored,
    }),
  );
  const color = () => { state.isColored = !state.isColored; redraw(); };
  const hasTokens = (rollout.turns || []).some((turn) => turn.tokens);
  return {
    page,
    nodes: [
      h("p", null, h("a", { href: link(["run", run.id, "rollouts"], { kind: kind === "step" ? "" : kind, step }) }, "← rollouts"), " ",
        h("b", null, rollout.task_id), h("span", { class: "quiet" }, ` ${kind === "eval" ? "held-out, after" : ""} step ${step}${entry.grp === null ? "" : `, group ${entry.grp}`}`)),
      siblingBar(run, siblings, id, state, redraw),
      isEqual && h("p", { class: "quiet" }, "All rewards of this group are equal, so no token has an advantage."),
      hasTokens && !state.sideBySide && h("p", { class: "filters" }, h("button", { type: "button", id: "color", "aria-pressed": String(state.isColored), onclick: color }, "Color sampled tokens"), h("span", { class: "quiet small" }, "the less likely, the stronger")),
      h("div", { class: `columns ${state.sideBySide ? "" : "single"}` }, cards),
    ],
  };
}

function siblingBar(run, siblings, id, state, redraw) {
  if (siblings.length < 2) return null;
  const toggle = () => { state.sideBySide = !state.sideBySide; redraw(); };
  return h("nav", { class: "sibs", "aria-label": "siblings of the group" },
    siblings.map(({ entry }) => h("a", { href: rolloutLink(run, entry), "aria-current": entry.rollout_id === id && "true" }, entry.error ? "failed" : figure(entry.reward))),
    h("button", { type: "button", id: "side", "aria-pressed": String(Boolean(state.sideBySide)), onclick: toggle }, "Side by side"));
}

// A held-out task before and after training, side by side.
export async function flipPage(run, query) {
  const found = await Promise.all([query.before, query.after].map(async (step) => {
    const list = await ask("rollouts", { run: run.id, kind: "eval", step, q: query.task, limit: 1 });
    return list.rows.length ? ask("rollout", { run: run.id, kind: "eval", step, id: list.rows[0].rollout_id }) : null;
  }));
  const columns = found.map((page, index) => h("section", null, h("h2", null, `after step ${index ? query.after : query.before}`), page ? rolloutCard(page.rollout, { detail: false }) : h("p", { class: "quiet" }, "not evaluated")));
  return [h("p", null, h("a", { href: link(["run", run.id, "evaluation"], { before: query.before, after: query.after }) }, "← evaluations"), " ", h("b", null, query.task)), h("div", { class: "columns" }, columns)];
}
