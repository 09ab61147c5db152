// Read /status every few seconds and show it. All text from the server is set as text, never as markup.
"use strict";
const SECONDS = 3, KEY = "metaleader token";
const byId = (id) => document.getElementById(id);
const number = (value) => Math.round(value).toLocaleString("en");
const short = (value) => value === null || value === undefined ? "–" : value === 0 ? "0" : Number(value.toPrecision(3)).toString();
const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
};
const ago = (seconds) => {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
};
const count = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
const add = (parent, name, text, className) => {
  const child = parent.appendChild(document.createElement(name));
  if (text !== undefined) child.textContent = text;
  if (className) child.className = className;
  return child;
};
const draw = (parent, name, attributes, text) => {
  const child = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [key, value] of Object.entries(attributes)) child.setAttribute(key, value);
  if (text !== undefined) child.textContent = text;
  return child;
};

function rows(table, items, cells, none) {
  const body = table.querySelector("tbody");
  body.replaceChildren();
  for (const item of items) {
    const row = add(body, "tr");
    cells(item).forEach(([text, className], i) => add(row, i ? "td" : "th", text, className));
  }
  if (!items.length) {
    const cell = add(add(body, "tr"), "td", none, "none");
    cell.colSpan = table.querySelectorAll("thead th").length;
  }
}

// Round numbers for an axis: of a logarithmic one 1, 2 and 5 times powers of ten.
function ticks(low, high, logarithmic, most) {
  if (logarithmic) {
    for (const factors of [[1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
        for (const factor of factors) {
          const value = factor * 10 ** power;
          if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
        }
      if (found.length <= most) return found;
    }
  }
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

function chart(id, series, xLabel, yLabel, wholeNumbers) {
  const plot = byId(id), legend = byId(`${id}-legend`), caption = byId(`${id}-caption`);
  plot.replaceChildren();
  legend.replaceChildren();
  const points = series.flatMap((one) => one.points);
  if (!points.length) { add(plot, "p", "No observations yet.", "none"); caption.textContent = ""; return; }
  for (const one of series.filter((one) => one.points.length)) {
    const item = add(legend, "li"), swatch = draw(item, "svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    draw(swatch, "path", { d: "M0 5H26", class: `line ${one.style}` });
    item.append(one.name);
  }
  const width = Math.max(300, Math.min(600, plot.clientWidth || 480)), height = 260;
  const left = 58, right = 26, top = 10, bottom = 44;
  const positive = points.map(([, y]) => y).filter((y) => y > 0);
  const high = Math.max(...points.map(([, y]) => y)), least = Math.min(...positive);
  const logarithmic = positive.length > 0 && high / least > 15;
  const low = logarithmic ? least : 0, top_ = high > low ? high : low + 1;
  const scale = (y) => logarithmic ? Math.log(Math.max(y, low) / low) / Math.log(top_ / low || 2) : (y - low) / (top_ - low);
  const first = Math.min(...points.map(([x]) => x)), last = Math.max(...points.map(([x]) => x));
  const atX = (x) => left + (width - left - right) * (last > first ? (x - first) / (last - first) : 0.5);
  const atY = (y) => height - bottom - (height - top - bottom) * scale(y);
  const latest = series.filter((one) => one.points.length).map((one) => `${one.name} ${short(one.points.at(-1)[1])}`);
  const svg = draw(plot, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", `${yLabel} by ${xLabel}. Latest: ${latest.join(", ")}.`);
  for (const value of ticks(low, top_, logarithmic, 6)) {
    draw(svg, "path", { class: "grid", d: `M${left} ${atY(value)}H${width - right}` });
    draw(svg, "text", { x: left - 6, y: atY(value) + 4, "text-anchor": "end" }, short(value));
  }
  for (const value of ticks(first, last, false, width < 420 ? 4 : 7).filter((x) => !wholeNumbers || Number.isInteger(x))) {
    draw(svg, "path", { class: "grid", d: `M${atX(value)} ${height - bottom}v5` });
    draw(svg, "text", { x: atX(value), y: height - bottom + 19, "text-anchor": "middle" }, number(value));
  }
  draw(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel);
  draw(svg, "text", { x: 13, y: (height - bottom + top) / 2, "text-anchor": "middle",
    transform: `rotate(-90 13 ${(height - bottom + top) / 2})` }, logarithmic ? `${yLabel}, log scale` : yLabel);
  for (const one of series) {
    const at = one.points.map(([x, y]) => `${atX(x).toFixed(1)} ${atY(y).toFixed(1)}`);
    if (at.length > 1) draw(svg, "path", { class: `line ${one.style}`, d: `M${at.join("L")}` });
    if (at.length && at.length < 12) one.points.forEach(([x, y]) => draw(svg, "circle", { class: one.style, cx: atX(x), cy: atY(y), r: 3 }));
  }
  caption.textContent = `Latest: ${latest.join(", ")}.`;
}

function show(state) {
  byId("folder").textContent = state.folder;
  document.title = `metaleader: ${state.folder}`;
  const problem = state.stopped || state.error || state.update_error;
  const summary = byId("summary");
  summary.className = problem ? "bad" : "good";
  summary.textContent = `${state.learner}, ${state.role}, metaleader ${state.version}` + (problem ? `. ${problem}` : ".");
  const numbers = [
    ["tasks", number(state.tasks), state.set_aside.total ? `${number(state.set_aside.total)} set aside` : ""],
    ["datapoints", number(state.datapoints), ""],
    ["updates made", number(state.step), [
      state.updates_due && `${number(state.updates_due)} due`, state.update_process && `in process ${state.update_process}`,
    ].filter(Boolean).join(", ")],
    ["behind", number(state.behind), "observations that no update has used" +
      (state.staleness ? `; parameters lack data of ${short(state.staleness)} s` : "")],
    ["on disk", bytes(state.bytes), `${count(state.record, "record")}, checkpoint at ${number(state.checkpoint)}`],
  ];
  if (state.role === "writer") numbers.push(["journal lag", number(state.journal_lag), "calls not written yet"]);
  else numbers.push(["journal read", ago(state.age), "for the last time"]);
  const list = byId("numbers");
  list.replaceChildren();
  for (const [name, value, note] of numbers) {
    const box = add(list, "div");
    add(box, "dt", name);
    const item = add(box, "dd", value);
    if (note) add(item, "small", note);
  }
  const aside = Object.entries(state.set_aside.tasks);
  byId("aside").hidden = !aside.length;
  rows(byId("aside").querySelector("table"), aside, ([task, reason]) => [[task], [reason, "words"]], "");
  const { observations, tasks, columns } = state.curves;
  const loss = `mean ${state.loss.replaceAll("_", " ")}`;
  chart("over-time", [
    { name: "adapted", style: "a", points: observations.map(([x, y]) => [x, y]) },
    { name: "without adaptation", style: "b", points: observations.map(([x, , y]) => [x, y]) },
  ], "observations", loss, true);
  if (observations.length > 1) byId("over-time-caption").textContent +=
    ` Each point is the mean of ${count(observations[0][0], "observation")}; the latest observation was ${ago(state.time - observations.at(-1)[3])}.`;
  const names = columns.map((least, i) => {
    const most = i + 1 < columns.length ? columns[i + 1] - 1 : null;
    return least === 0 ? "0 earlier datapoints" : most === null ? `${least} or more` : least === most ? `${least}` : `${least} to ${most}`;
  });
  chart("over-tasks", names.map((name, i) => ({
    name, style: `c${i}`, points: tasks.filter((row) => row[i + 1] !== null).map((row) => [row[0] + 1, row[i + 1]]),
  })), "place of the task in the stream", loss, true);
  if (tasks.length > 1) byId("over-tasks-caption").textContent += ` Each point is the mean of ${count(tasks[1][0] - tasks[0][0], "task")}.`;
  rows(byId("recent"), state.recent, (one) => [
    [one.task], [number(one.datapoints)], [short(one.loss)], [short(one.unadapted), "wide"], [ago(state.time - one.time)],
  ], "None since the server started.");
  rows(byId("errors"), state.errors, (one) => [
    [one.request], [String(one.status)], [one.message, "words"], [ago(state.time - one.time)],
  ], "None since the server started.");
  byId("main").hidden = false;
}

let last = null;
async function refresh() {
  const token = sessionStorage.getItem(KEY);
  let wait = SECONDS;
  try {
    const answer = await fetch("/status", { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
    if (answer.status === 401) {
      byId("login").hidden = false;
      byId("main").hidden = true;
      byId("refused").hidden = !token;
      byId("summary").className = "";
      byId("summary").textContent = "This server needs a token.";
      return;
    }
    if (!answer.ok) throw new Error((await answer.json()).error);
    byId("login").hidden = true;
    show(last = await answer.json());
  } catch (error) {
    byId("summary").className = "bad";
    byId("summary").textContent = `The server does not answer (${error.message}); trying again.`;
    wait = 2 * SECONDS;
  }
  setTimeout(refresh, wait * 1000);
}
const enter = () => { sessionStorage.setItem(KEY, byId("token").value.trim()); refresh(); };
byId("enter").addEventListener("click", enter);
byId("token").addEventListener("keydown", (event) => { if (event.key === "Enter") enter(); });
addEventListener("resize", () => { if (last) show(last); });
refresh();
