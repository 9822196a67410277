"use strict";
// The live page: draws what /events sends. Text is always set as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";
const by = (id) => document.getElementById(id);

function unit(value, steps, space) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  let scaled = value, name = steps[0];
  for (const next of steps.slice(1)) {
    if (Math.abs(scaled) < 999.5) break;
    scaled /= 1000; name = next;
  }
  return Number(scaled.toPrecision(3)) + (space === undefined ? " " : space) + name;
}
const bytes = (v) => unit(v, ["B", "kB", "MB", "GB", "TB", "PB"]);
const rate = (v) => unit(v, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]);
function seconds(v) {
  if (v === null || v === undefined) return "–";
  if (v && Math.abs(v) < 0.001) return Number((1e6 * v).toPrecision(3)) + " µs";
  if (Math.abs(v) < 1) return Number((1000 * v).toPrecision(3)) + " ms";
  if (v < 120) return Number(v.toPrecision(3)) + " s";
  if (v < 7200) return Number((v / 60).toPrecision(3)) + " min";
  return v < 172800 ? Number((v / 3600).toPrecision(3)) + " h" : Number((v / 86400).toPrecision(3)) + " d";
}
const percent = (v) => (v === null || v === undefined ? "–" : (100 * v).toFixed(v < 0.1 ? 1 : 0) + " %");
const number = (v, digits) => (v === null || v === undefined ? "–" : Number(v.toPrecision(digits || 4)).toLocaleString("en"));

const whole = (v) => v.toLocaleString("en");
const dollars = (v) => "$" + (v && v < 0.1 ? Number(v.toPrecision(2)).toFixed(Math.min(8, 1 - Math.floor(Math.log10(v)))) : v.toFixed(2));

function element(name, text, kind) {
  const found = document.createElement(name);
  if (text !== undefined) found.textContent = text;
  if (kind) found.className = kind;
  return found;
}
function shape(parent, name, attributes, text) {
  const found = document.createElementNS(SVG, name);
  for (const key in attributes) found.setAttribute(key, attributes[key]);
  if (text !== undefined) found.textContent = text;
  parent.appendChild(found);
  return found;
}
function picture(id, width, height, label) {
  const found = document.createElementNS(SVG, "svg");
  found.setAttribute("viewBox", `0 0 ${width} ${height}`);
  found.setAttribute("role", "img");
  found.setAttribute("aria-label", label);
  by(id).replaceChildren(found);
  return found;
}
function nothing(id, text) { by(id).replaceChildren(element("p", text, "none")); }
function mark() { // a card with nothing to show is no taller than its words
  document.querySelectorAll(".card").forEach((card) => card.classList.toggle("empty", Boolean(card.querySelector(".none"))));
}

function table(id, heads, rows) {
  const head = element("tr");
  heads.forEach((text) => head.appendChild(element("th", text)));
  const body = rows.map((cells) => {
    const row = element("tr");
    cells.forEach((cell, i) => {
      const made = cell instanceof Node ? cell : element("td", cell);
      made.dataset.head = heads[i]; // on a telephone, where a row is a block, its cells are named
      row.appendChild(made);
    });
    return row;
  });
  by(id).replaceChildren(head, ...body);
}

function tiles(d) {
  const step = Math.max(0, ...d.sites.map((s) => s.step));
  const late = d.last_round && d.last_round.late ? d.last_round.late : "–";
  const rows = [
    [whole(step), d.steps ? `of ${whole(d.steps)} steps` : "steps"], [whole(d.rounds), "rounds"], [seconds(d.t), "time"],
    [bytes(d.up_bytes + d.down_bytes), "WAN bytes so far"], [dollars(d.dollars), `so far, ${dollars(d.dollars_hour)} an hour`],
    [late, "last to come in the last round"],
  ];
  if (d.agreement !== null) rows.push([percent(d.agreement), "signs that sites agree on"]);
  by("tiles").replaceChildren(...rows.map(([value, text]) => {
    const tile = element("div", undefined, "tile");
    tile.append(element("b", value), element("span", text));
    return tile;
  }));
}

const lost = (s) => (s.cut || s.connected === false) && !s.finished && !s.removed; // and not sent away by an operator

function tree(d) {
  const n = d.sites.length, narrow = window.innerWidth < 760, shown = d.sites.slice(0, 24);
  const columns = Math.min(n || 1, narrow ? 2 : 5), rows = Math.ceil(shown.length / columns);
  const width = narrow ? 360 : 1100, cell = width / columns, height = 90 + rows * 156;
  const svg = picture("tree", width, height, "sites, links and the global server");
  const sx = width / 2, sy = 40;
  const most = Math.max(1, ...shown.map((s) => s.up_bit_s + s.down_bit_s));
  const places = shown.map((s, i) => [cell * (i % columns + 0.5), 160 + Math.floor(i / columns) * 156]);
  shown.forEach((s, i) => {
    const down = lost(s), flow = s.up_bit_s + s.down_bit_s;
    const [x, y] = places[i], left = cell * (i % columns), gutter = Math.abs(left - sx) < Math.abs(left + cell - sx) ? left : left + cell;
    const between = i < columns ? "" : `L${gutter} 125V${y - 45}`; // a lower row is reached between the boxes above it
    shape(svg, "path", { d: `M${sx} ${sy}${between}L${x} ${y}`, fill: "none", class: "edge" + (down ? " bad" : flow ? "" : " idle"),
      "stroke-width": 1.5 + 5 * Math.sqrt(flow / most) });
  });
  shape(svg, "rect", { x: sx - 80, y: sy - 22, width: 160, height: 44, rx: 12, class: "node" });
  shape(svg, "text", { x: sx, y: sy - 2, "text-anchor": "middle" }, d.server || "global server");
  shape(svg, "text", { x: sx, y: sy + 14, "text-anchor": "middle", class: "soft" }, `version ${d.version}`);
  shown.forEach((s, i) => {
    const [x, y] = places[i], down = lost(s), w = Math.min(cell - 12, 200);
    shape(svg, "rect", { x: x - w / 2, y: y - 26, width: w, height: 100, rx: 12, class: "node" + (down ? " bad" : "") });
    shape(svg, "text", { x, y: y - 8, "text-anchor": "middle" }, s.name);
    const state = s.removed ? s.removed : s.finished ? "finished" : s.cut && down ? `cut, step ${s.step}` : down ? "not connected" : `step ${s.step}`;
    shape(svg, "text", { x, y: y + 8, "text-anchor": "middle", class: down ? "soft bad" : "soft" }, state);
    shape(svg, "text", { x, y: y + 24, "text-anchor": "middle", class: "soft" }, `↑ ${rate(s.up_bit_s)}  ↓ ${rate(s.down_bit_s)}`);
    const known = s.delay_seconds === null || s.delay_seconds === undefined ? null : 2 * s.delay_seconds;
    const line = s.bandwidth_bit_s ? `recipe: ${rate(s.bandwidth_bit_s)}, ${seconds(known)}` : "not in the recipe";
    const about = [s.trip_seconds ? `trip ${seconds(s.trip_seconds)}` : "", s.loss_rate ? `loss ${percent(s.loss_rate)}` : "", s.cuts ? `${s.cuts} cut${s.cuts > 1 ? "s" : ""}` : "no cut"];
    shape(svg, "text", { x, y: y + 40, "text-anchor": "middle", class: "soft" }, line);
    shape(svg, "text", { x, y: y + 56, "text-anchor": "middle", class: "soft" }, about.filter(Boolean).join(", "));
  });
  if (n > shown.length) shape(svg, "text", { x: 4, y: height - 6, class: "soft" }, `and ${n - shown.length} more sites`);
}

function mean(all) { // at the steps of the first: the mean of what the others had last
  const places = all.map(() => 0);
  return all[0].map(([step]) => [step, all.reduce((sum, points, i) => {
    while (places[i] + 1 < points.length && points[places[i] + 1][0] <= step) places[i] += 1;
    return sum + points[places[i]][1];
  }, 0) / all.length]);
}

function curve(id, series, format, label, limits, empty = "nothing yet") {
  const names = Object.keys(series).filter((name) => series[name].length);
  if (!names.length) return nothing(id, empty);
  const W = window.innerWidth < 760 ? 380 : 520, H = 230, L = 54, R = 8, T = 8, B = 24;
  const all = names.flatMap((name) => series[name]);
  const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) x0 = 0;
  if (limits) { y0 = Math.max(limits[0], y0 - 0.05); y1 = Math.min(limits[1], y1 + 0.05); }
  if (y0 === y1) { y0 -= 0.5; y1 += 0.5; }
  // What falls to a small part of where it began would be a line along the floor: its logarithm is drawn.
  const middle = ys.slice().sort((a, b) => a - b)[ys.length >> 1], log = !limits && y0 >= 0 && y1 > 20 * middle;
  const scale = (y) => (log ? Math.log10(Math.max(y, 1e-4 * y1)) : y), lowest = scale(y0), highest = scale(y1);
  const X = (x) => L + (W - L - R) * (x - x0) / (x1 - x0), Y = (y) => H - B - (H - B - T) * (scale(y) - lowest) / (highest - lowest);
  const svg = picture(id, W, H, log ? `${label}, logarithmic` : label);
  for (let i = 0; i <= 4; i++) {
    const at = lowest + (highest - lowest) * i / 4, y = log ? 10 ** at : at;
    shape(svg, "line", { x1: L, x2: W - R, y1: Y(y), y2: Y(y), class: "grid" });
    shape(svg, "text", { x: L - 6, y: Y(y) + 4, "text-anchor": "end", class: "soft" }, format(y));
  }
  shape(svg, "text", { x: L, y: H - 6, class: "soft" }, `step ${x0}`);
  shape(svg, "text", { x: W - R, y: H - 6, "text-anchor": "end", class: "soft" }, `step ${x1}`);
  const path = (points) => points.map((p) => `${X(p[0]).toFixed(1)},${Y(p[1]).toFixed(1)}`).join(" ");
  if (names.length > 5) { // too many to tell apart: their mean, and all of them behind it
    names.forEach((name) => shape(shape(svg, "polyline", { points: path(series[name]), class: "line faint" }), "title", {}, name));
    shape(svg, "polyline", { points: path(mean(names.map((name) => series[name]))), class: "line", "data-series": 0 });
    shape(svg, "text", { x: W - R - 4, y: T + 14, "text-anchor": "end", "data-series": 0 }, `the mean of ${names.length} sites`);
    return;
  }
  names.forEach((name, i) => {
    const line = shape(svg, "polyline", { points: path(series[name]), class: "line", "data-series": i % 5 });
    shape(line, "title", {}, name);
    if (series[name].length < 40) series[name].forEach((p) => shape(svg, "circle", { cx: X(p[0]), cy: Y(p[1]), r: 3, "data-series": i % 5 }));
    if (names.length > 1) shape(svg, "text", { x: W - R - 4, y: T + 14 + 16 * i, "text-anchor": "end", "data-series": i % 5 }, name);
  });
}

function timeline(d) {
  const { start, end, sites } = d.timeline, shown = sites.slice(0, 24);
  if (!shown.length || end <= start) return nothing("timeline", away(d) || "nothing yet");
  const narrow = window.innerWidth < 760, W = narrow ? 400 : 1100, L = narrow ? 72 : 92, row = 40, H = shown.length * row + 22;
  const svg = picture("timeline", W, H, "steps, waiting and pushes of the last minute");
  const X = (t) => L + (W - L - 4) * (Math.min(Math.max(t, start), end) - start) / (end - start);
  const bar = (kind, a, b, y, h, text) => {
    const found = shape(svg, "rect", { class: kind, x: X(a).toFixed(2), y, width: Math.max(0.7, X(b) - X(a) - 0.3).toFixed(2), height: h, rx: 1 });
    shape(found, "title", {}, text);
  };
  for (let i = 0; i <= 4; i++) {
    const t = start + (end - start) * i / 4;
    shape(svg, "line", { x1: X(t), x2: X(t), y1: 0, y2: H - 18, class: "grid" });
    shape(svg, "text", { x: X(t), y: H - 4, "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle", class: "soft" }, i === 4 ? "now" : seconds(t - end));
  }
  shown.forEach((s, i) => {
    const y = i * row + 4;
    shape(svg, "text", { x: 0, y: y + 15 }, s.site);
    s.steps.forEach(([a, b, n]) => bar("step", a, b, y, 15, `step ${n}: ${seconds(b - a)}`));
    s.waits.forEach(([a, b, why]) => bar("wait", a, b, y, 15, `waiting (${why}): ${seconds(b - a)}`));
    s.encodes.forEach(([a, b]) => bar("encode", a, b, y + 19, 13, `encoding: ${seconds(b - a)}`));
    s.pushes.forEach(([a, b, n, size]) => bar("push", a, b, y + 19, 7, `round ${n}: ${bytes(size)}, ${seconds(b - a)}`));
  });
}

function sites(d) {
  const heads = ["site", "state", "step", "loss", "waiting, last minute", "waited", "last to come", "others waited for it", "up", "down", "exchange"];
  table("sites", heads, d.sites.map((s) => {
    const down = lost(s);
    const state = element("td", s.removed ? s.removed : s.aside ? "set aside" : s.finished ? "finished" : s.cut && down ? "cut" : down ? "not connected" : s.connected ? "connected" : "awaited", down ? "bad" : s.connected || s.finished ? "good" : "");
    return [s.name, state, String(s.step), value(s.loss), percent(s.waiting_share), seconds(s.waiting_seconds),
      s.rounds && s.last_of !== null ? `${s.last_of} of ${s.rounds}` : "–", seconds(s.margin_seconds), bytes(s.up_bytes), bytes(s.down_bytes), seconds(s.exchange_seconds)];
  }));
}

const away = (d) => d.rounds && !d.sites.some((s) => s.loss !== null) ? "only the sites' own logs have it, and they are not here" : "";
const over = (d) => OVER.includes(d.status);
const none = (d, why) => over(d) ? why : "nothing yet";
const value = (v) => v === null || v === undefined ? "–" : v && Math.abs(v) < 0.001 ? v.toExponential(1) : String(Number(v.toPrecision(3)));

function compression(d) {
  const rows = d.sites.filter((s) => s.encode_seconds !== null || s.push_norm !== null);
  if (!rows.length) return by("compression").replaceChildren(element("caption", none(d, "only the logs of sites with processes have it"), "none"));
  const heads = ["site", "encoding a push", "norm of a push", "norm of the residual", "stays behind", "round trip"];
  table("compression", heads, rows.map((s) => [s.name, seconds(s.encode_seconds), value(s.push_norm), value(s.residual),
    percent(s.left_behind), seconds(s.trip_seconds)]));
}

function items(id, rows, none) {
  if (!rows.length) return nothing(id, none);
  by(id).replaceChildren(...rows.map(([text, small, kind]) => {
    const item = element("div", undefined, "item");
    item.append(element("span", text, kind), element("small", small));
    return item;
  }));
}

function show(d) {
  document.title = `${d.name}: WeightGrad`;
  by("name").textContent = d.name;
  by("status").textContent = d.status;
  by("status").className = "pill " + d.status;
  const size = d.parameters ? `, ${d.parameters.toLocaleString("en")} parameters` : "";
  const recipe = d.recipe && !d.name.includes(d.recipe) ? `recipe ${d.recipe}, ` : "";
  by("lead").textContent = `${recipe}${d.strategy || "strategy not known"}${size}, ${d.sites.length} site${d.sites.length === 1 ? "" : "s"}${d.server ? `, global server ${d.server}` : ""}`;
  by("unread").textContent = d.unread ? ` ${d.unread} line${d.unread === 1 ? "" : "s"} of the event logs could not be read.` : "";
  tiles(d); tree(d); timeline(d); sites(d); compression(d);
  curve("loss", d.loss, value, "loss by step", undefined, away(d) || "nothing yet");
  curve("accuracy", { accuracy: d.accuracy }, (v) => (100 * v).toFixed(1) + " %", "accuracy by step", [0, 1], none(d, "this run's logs have none"));
  items("decisions", d.decisions.map((x) => [`a round every ${x.every === 1 ? "step" : x.every + " steps"}, ${x.up} up, ${x.down} down, ` +
    (x.overlap ? `results ${x.overlap === 1 ? "a step" : x.overlap + " steps"} late` : "results are waited for"),
    `${seconds(x.t)}: ${x.why}`]), !d.strategy || d.strategy.startsWith("auto") ? none(d, "the log has none") : "this strategy is fixed");
  items("faults", d.faults.map((x) => [x.what, seconds(x.t) + (x.times > 1 ? `, ${x.times} times in a row` : ""), { fault: "bad", warning: "warn", operator: "operator" }[x.kind] || "good"]), "none");
  table("processes", ["process", "memory", "CPU"], d.processes.map((p) => [p.name, bytes(p.memory_bytes), percent(p.cpu)]));
  if (!d.processes.length) by("processes").replaceChildren(element("caption", "none of this run on this machine", "none"));
  table("certificates", ["whose", "days left"], d.certificates.map((c) => [c.who, element("td", String(c.days), c.days < 14 ? "bad" : c.days < 30 ? "warn" : "")]));
  if (!d.certificates.length) by("certificates").replaceChildren(element("caption", "none in the directory of the run", "none"));
  mark();
  document.body.dataset.version = d.version;
  document.body.dataset.ready = "1";
}

// A run that goes on is followed by server-sent events; one that has ended is looked at now and then.
const OVER = ["finished", "interrupted", "diverged", "failed"];
const LOOK_MS = 5000;
let latest = null;
let stream = null;
function follow(d) {
  latest = d;
  show(d);
  if (OVER.includes(d.status)) {
    if (stream) { stream.close(); stream = null; }
    setTimeout(look, LOOK_MS);
  } else if (!stream) {
    stream = new EventSource("events" + window.location.search);
    stream.onmessage = (message) => follow(JSON.parse(message.data));
    stream.onerror = silent;
  }
}
function silent() {
  by("status").textContent = "silent";
  by("status").className = "pill silent";
}
function look() {
  fetch("data.json" + window.location.search, { cache: "no-store" })
    .then((answer) => answer.json()).then(follow)
    .catch(() => { if (!latest || !OVER.includes(latest.status)) silent(); setTimeout(look, LOOK_MS); });
}
look();
window.addEventListener("resize", () => { if (latest) show(latest); });
