// Build elements and format figures. Text only ever enters the page as text nodes, so no markup of a run is rendered.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(4)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

export function figure(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("-", "−");
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  return value.toPrecision(digits - 1).replace("-", "−");
}

// `0.52`, with `sign` `+0.52`, and `0.003` near 0.
export function short(value, sign = false) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = size.toFixed(size && size < 0.005 ? 3 : 2);
  const mark = value < 0 && Number(text) !== 0 ? "−" : sign ? "+" : "";
  return mark + text;
}

export function interval(low, high, sign = false) {
  return low === null || low === undefined ? "" : ` [${short(low, sign)}, ${short(high, sign)}]`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 120) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function dollars(value) {
  return `$${value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 4 })}`;
}

export function clock(time) {
  return time ? new Date(time * 1000).toLocaleTimeString("en-GB") : "";
}

export function ago(time) {
  if (!time) return "";
  const passed = Date.now() / 1000 - time;
  if (passed < 90) return "now";
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return new Date(time * 1000).toISOString().slice(0, 10);
}

export function plural(count, noun) {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}

export function table(columns, rows, props = {}) {
  const head = columns.map((column) => h("th", { scope: "col", class: column.kind, title: column.hint }, column.title));
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      props,
      h("thead", null, h("tr", null, head)),
      h("tbody", null, rows),
    ),
  );
}

export function section(title, ...children) {
  return h("section", { class: "block" }, title && h("h2", null, title), children);
}
