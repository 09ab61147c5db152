// Show the values of a chart under the pointer, or at the position chosen with the arrow keys.
"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const values = JSON.parse(plot.dataset.values);
  const svg = plot.querySelector("svg"), probe = plot.querySelector(".probe"), tip = plot.querySelector(".tip");
  let at = -1;

  const svgElement = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return probe.appendChild(element);
  };
  const hide = () => { at = -1; tip.hidden = true; probe.replaceChildren(); };
  const show = (index) => {
    if (index === at) return;
    at = index;
    const box = svg.viewBox.baseVal, x = values.x[at];
    probe.replaceChildren();
    tip.replaceChildren();
    svgElement("path", { d: `M${x} 10V${box.height - 40}` });
    tip.appendChild(document.createElement("b")).textContent = values.label[at];
    for (const series of values.series) {
      if (series.text[at] === null) continue;
      svgElement("circle", { class: "series", cx: x, cy: series.y[at], r: 4, style: series.colour });
      const row = tip.appendChild(document.createElement("div"));
      const dot = row.appendChild(document.createElement("i"));
      dot.className = "series";
      dot.style.cssText = series.colour;
      row.append(`${series.name} ${series.text[at]}`);
    }
    tip.hidden = false;
    // On the side with more space, and inside the plot.
    const place = x / box.width * plot.clientWidth, room = plot.clientWidth - tip.offsetWidth;
    const left = x < box.width / 2 ? place + 12 : place - 12 - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, left))}px`;
  };

  const point = (event) => {
    const area = svg.getBoundingClientRect();
    const x = (event.clientX - area.left) / area.width * svg.viewBox.baseVal.width;
    show(values.x.reduce((best, place, i) => Math.abs(place - x) < Math.abs(values.x[best] - x) ? i : best, 0));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  // After a touch ends, the values stay visible until the next touch elsewhere.
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
  document.addEventListener("pointerdown", (event) => { if (!svg.contains(event.target)) hide(); });
  svg.addEventListener("focus", () => { if (at < 0 && svg.matches(":focus-visible")) show(values.x.length - 1); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const last = values.x.length - 1;
    const next = { ArrowLeft: at < 0 ? last : at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    if (next === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(last, next)));
  });
}
