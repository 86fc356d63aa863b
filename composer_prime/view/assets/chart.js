// Charts as inline SVG: lines with a mean of several steps, and intervals.
import { h, svg, figure } from "./dom.js";

const WIDTH = 460;
const HEIGHT = 190;
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 22;

// The mean of the last `count` values from there on: fewer steps show no trend.
export function movingMean(points, count) {
  const means = [];
  let sum = 0;
  points.forEach(([x, y], index) => {
    sum += y;
    if (index >= count) sum -= points[index - count][1];
    if (index >= count - 1) means.push([x, sum / count]);
  });
  return means;
}

function ticks(low, high, count = 4) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / size - 1e-9) * size; value <= high + size * 1e-6; value += size) found.push(value);
  return found.map((value) => (Math.abs(value) < size * 1e-9 ? 0 : value));
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power += 1) found.push(10 ** power);
  const every = Math.ceil(found.length / 5) || 1;
  return found.length ? found.filter((_, index) => index % every === 0) : [low, high];
}

function scales(spec, xs, ys) {
  let low = Math.min(...ys);
  let high = Math.max(...ys);
  if (spec.zero !== false && !spec.log && low > 0 && low < high * 0.6) low = 0;
  if (spec.unit && low >= 0 && high <= 1) [low, high] = [0, Math.max(high, 0.05)];
  if (!spec.log) high += (high - low) * 0.06;
  if (low === high) [low, high] = [low - Math.abs(low) * 0.1, high + (Math.abs(high) * 0.1 || 0.5)];
  let [first, last] = [Math.min(...xs), Math.max(...xs)];
  if (first === last) [first, last] = [first - 1, last + 1];
  const x = (value) => LEFT + ((value - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  if (spec.log) low = Math.max(low, high / 1e6); // What is far below is drawn at the bottom.
  const transform = spec.log ? Math.log10 : (value) => value;
  const span = transform(high) - transform(low) || 1;
  const y = (value) => HEIGHT - BOTTOM - ((transform(Math.max(value, spec.log ? low : value)) - transform(low)) / span) * (HEIGHT - TOP - BOTTOM);
  return { x, y, low, high, first, last };
}

function axes(scale, spec) {
  const marks = spec.log ? logTicks(scale.low, scale.high) : ticks(scale.low, scale.high);
  const rows = marks.map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: scale.y(value), y2: scale.y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: scale.y(value) + 3.5, "text-anchor": "end" }, tickText(value)),
  ]);
  const whole = ticks(scale.first, scale.last, 5).filter((value) => spec.xText || Number.isInteger(value));
  const columns = whole.map((value) =>
    svg(
      "text",
      { class: "tick", x: scale.x(value), y: HEIGHT - 6, "text-anchor": "middle" },
      spec.xText ? spec.xText(value) : value,
    ),
  );
  return [rows, columns];
}

function tickText(value) {
  return figure(value, 4).replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
}

function path(points, scale) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`).join("");
}

// spec: title, note, unit (a share), log, series [{name, color, points, mean: steps of its bold line}], intervals [{x, mean, low, high, color}]
export function lineChart(spec) {
  const usable = ([, y]) => y !== null && Number.isFinite(y) && (!spec.log || y > 0);
  const series = spec.series
    .map((each) => ({ ...each, points: each.points.filter(usable) }))
    .filter((each) => each.points.length);
  const intervals = (spec.intervals || []).filter((each) => each.mean !== null);
  if (!series.length && !intervals.length) return null;
  if (spec.optional && series.every((each) => each.points.every(([, y]) => y === 0))) return null;
  const xs = [...series.flatMap((each) => each.points.map((point) => point[0])), ...intervals.map((each) => each.x)];
  const ys = series.flatMap((each) => each.points.map((point) => point[1]));
  for (const each of intervals) ys.push(each.mean, ...(each.low === null ? [] : [each.low, each.high]));
  const scale = scales(spec, xs, ys);
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": describe(spec, series, intervals) },
    axes(scale, spec),
    series.map((each) => seriesMarks(each, scale)),
    intervals.map((each) => intervalMarks(each, scale)),
    cursor,
  );
  const readout = h("output", { class: "readout" });
  follow(drawing, cursor, readout, scale, series, intervals, spec);
  return frame(spec, drawing, readout, series, intervals);
}

function seriesMarks(each, scale) {
  const color = `c${each.color || 0}`;
  const means = each.mean ? movingMean(each.points, each.mean) : [];
  const isSparse = each.points.length <= 60;
  const raw = svg("path", { class: `line ${color} ${means.length ? "faint" : ""}`, d: path(each.points, scale) });
  const dots =
    isSparse && !each.plain
      ? each.points.map(([x, y]) =>
          svg("circle", { class: `dot ${color} ${means.length ? "faint" : ""}`, cx: scale.x(x), cy: scale.y(y), r: 1.8 }),
        )
      : [];
  return [raw, dots, means.length > 0 && svg("path", { class: `line bold ${color}`, d: path(means, scale) })];
}

function intervalMarks(each, scale) {
  const [x, color] = [scale.x(each.x), `c${each.color || 0}`];
  const bar =
    each.low !== null &&
    svg("path", {
      class: `bar ${color}`,
      d: `M${x} ${scale.y(each.low)}V${scale.y(each.high)}M${x - 4} ${scale.y(each.low)}h8M${x - 4} ${scale.y(each.high)}h8`,
    });
  return [bar, svg("rect", { class: `mark ${color}`, x: x - 3.2, y: scale.y(each.mean) - 3.2, width: 6.4, height: 6.4 })];
}

function describe(spec, series, intervals) {
  const parts = series.map((each) => {
    const [first, last] = [each.points[0], each.points[each.points.length - 1]];
    return `${each.name}: ${figure(first[1])} at ${Math.round(first[0])}, ${figure(last[1])} at ${Math.round(last[0])}`;
  });
  if (intervals.length) parts.push(`held-out ${intervals.map((each) => figure(each.mean)).join(", ")}`);
  return `${spec.title}. ${parts.join(". ")}`;
}

function follow(drawing, cursor, readout, scale, series, intervals, spec) {
  const xs = [...new Set([...series.flatMap((each) => each.points.map((p) => p[0])), ...intervals.map((each) => each.x)])];
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const nearest = xs.reduce((best, x) => (Math.abs(scale.x(x) - at) < Math.abs(scale.x(best) - at) ? x : best), xs[0]);
    cursor.setAttribute("x1", scale.x(nearest));
    cursor.setAttribute("x2", scale.x(nearest));
    cursor.setAttribute("visibility", "visible");
    const texts = series.flatMap((each) => {
      const point = each.points.find((p) => p[0] === nearest);
      return point ? [`${series.length > 1 ? `${each.name} ` : ""}${figure(point[1])}`] : [];
    });
    for (const each of intervals.filter((one) => one.x === nearest)) {
      const bounds = each.low === null ? "" : ` [${figure(each.low)}, ${figure(each.high)}]`;
      texts.push(`held-out ${figure(each.mean)}${bounds}`);
    }
    readout.textContent = `${spec.xText ? spec.xText(nearest) : `step ${nearest}`}: ${texts.join(", ")}`;
  });
  drawing.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
}

function frame(spec, drawing, readout, series, intervals) {
  const named = spec.series.length > 1 || intervals.length ? series : [];
  const legend = named.map((each) => h("span", { class: `key c${each.color || 0}` }, each.name));
  if (intervals.length) legend.push(h("span", { class: `key square c${intervals[0].color || 0}` }, "held-out, 95 %"));
  const smoothed = series.find((each) => each.mean && each.points.length >= each.mean);
  return h(
    "figure",
    { class: "chart" },
    h("figcaption", null, h("b", null, spec.title), spec.note && h("span", { class: "quiet" }, ` ${spec.note}`)),
    drawing,
    h(
      "div",
      { class: "legend" },
      legend,
      smoothed && h("span", { class: "quiet" }, `bold: mean of ${smoothed.mean} steps`),
      readout,
    ),
  );
}

// `scale`: lowest and highest value that fit, the same for lines that are compared.
export function sparkline(values, [low, high]) {
  if (!values.length) return h("span", { class: "quiet" }, "–");
  const x = (index) => 2 + (index / Math.max(values.length - 1, 1)) * 96;
  const y = (value) => 20 - ((value - low) / (high - low || 1)) * 16;
  const d = values.map((value, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const label = `reward from ${figure(values[0])} to ${figure(values[values.length - 1])}`;
  return svg("svg", { class: "spark", viewBox: "0 0 100 24", role: "img", "aria-label": label }, svg("path", { class: "line c0", d }));
}
