// Draws each <figure class="chart"> by Plotly when it comes into view. All charts share the steps, the cursor, the hidden runs,
// the scale and the smoothing. Texts in the traces are escaped where they are made (chart.py).
"use strict";
(() => {
  const hidden = new Set();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const log = document.getElementById("log"), slider = document.getElementById("smoothing");
  let following = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const themed = (text) => JSON.parse(text.replace(/"var\((--\w+)\)"/g, (_, name) => JSON.stringify(colour(name))));

  const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  function number(value, unit) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const small = unit === "s" && size > 0 && size < 0.1 ? [1e-3, "m"] : [1, ""];
    const [factor, prefix] = PREFIXES.find(([each]) => size >= each && (unit === "B" || size >= 1e5)) || small;
    const tiny = size > 0 && size / factor < 1e-3;
    const digits = tiny ? value.toExponential(3).replace(/\.?0+e/, "e") : Number((value / factor).toPrecision(4));
    return `${digits} ${prefix}${unit}`.trim();
  }

  const nearest = (xs, x) => xs.reduce((best, each, i) => (Math.abs(each - x) < Math.abs(xs[best] - x) ? i : best), 0);

  // Exponential moving average without the bias towards its start, as TensorBoard's.
  function smoothed(values, share) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * share + value * (1 - share);
      weight = weight * share + (1 - share);
      return sum / weight;
    });
  }

  // What is between the two lines of a band: a closed path for each part without gaps. A logarithm's bottom is `least`.
  function area(trace, least) {
    const x = [], y = [], part = [];
    const close = () => {
      if (part.length) {
        x.push(...part.map(([at]) => at), ...part.map(([at]) => at).reverse(), null);
        y.push(...part.map(([, , high]) => high), ...part.map(([, low]) => Math.max(low, least)).reverse(), null);
      }
      part.length = 0;
    };
    trace.x.forEach((at, i) => {
      const [low, high] = trace.customdata[i];
      if (low === null || high === null || high < least) close(); else part.push([at, low, high]);
    });
    close();
    const line = { color: trace.line.color + "59", width: 0.8 };
    return { x, y, line, mode: "lines", fill: "toself", fillcolor: trace.line.color + "29", hoverinfo: "skip", meta: trace.meta };
  }

  // The traces to draw: bands below the lines, and lines as they were below the smoothed ones.
  function drawn(chart, logarithmic) {
    const positive = chart.data.flatMap((trace) => [...trace.y, ...(trace.customdata || []).flat()]).filter((y) => y > 0);
    const least = logarithmic ? Math.min(...positive) : -Infinity;
    const share = Number(slider.value);
    return chart.data.filter((trace) => !hidden.has(trace.meta.run)).flatMap((trace) => {
      const found = trace.customdata ? [area(trace, least)] : [];
      if (logarithmic) trace.y = trace.y.map((y) => (y > 0 ? y : null));
      if (share === 0 || !trace.meta.smooth) return [...found, trace];
      return [...found, { ...trace, opacity: 0.25, hoverinfo: "skip" }, { ...trace, y: smoothed(trace.y, share) }];
    });
  }

  function layout(chart, logarithmic) {
    const dim = colour("--dim"), line = colour("--line"), family = getComputedStyle(document.body).fontFamily;
    const axis = { ...chart.layout.yaxis, type: logarithmic ? "log" : "linear", gridcolor: line, zeroline: false, nticks: 6 };
    if (logarithmic) delete axis.range;
    return {
      height: 210, margin: { l: 52, r: 12, t: 8, b: 22 }, paper_bgcolor: colour("--panel"), plot_bgcolor: colour("--panel"),
      font: { family, size: 11, color: dim },
      showlegend: false, barmode: "stack", bargap: 0, hovermode: "x",
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hoverlabel: { bgcolor: colour("--ground"), bordercolor: line, font: { color: colour("--text"), size: 12, family } },
      modebar: { bgcolor: "transparent", color: dim, activecolor: colour("--link") },
      xaxis: {
        range: [...steps], showgrid: false, zeroline: false, linecolor: line,
        ticks: "outside", ticklen: 4, tickcolor: line, nticks: 6,
        showspikes: true, spikemode: "across", spikesnap: "hovered data", spikethickness: 1, spikedash: "solid", spikecolor: dim,
      },
      yaxis: axis,
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: chart.layout.shapes,
    };
  }

  const RESET = { name: "whole", title: "All steps", icon: window.Plotly?.Icons.home, click: () => zoom(...whole) };
  const CONFIG = { responsive: true, displaylogo: false, doubleClick: false, modeBarButtons: [["zoom2d", "pan2d", RESET, "toImage"]] };

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.text = figure.querySelector(".chart-data").textContent;
      Object.assign(this, JSON.parse(this.text));
      this.plot = document.createElement("div");
      this.plot.className = "plot";
      this.plot.tabIndex = 0;
      this.details = figure.querySelector("details");
      figure.insertBefore(this.plot, this.details);
      this.details.addEventListener("toggle", () => this.fillTable());
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.stale = true;
      this.visible = false;
      this.tell(null);
    }

    async draw() {
      if (!this.visible || !this.stale) return;
      this.stale = false;
      Object.assign(this, themed(this.text));
      const stacked = this.data.some((trace) => trace.type === "bar");
      const logarithmic = log.checked && !stacked && this.data.some((trace) => !trace.meta.mark && trace.y.some((y) => y > 0));
      const first = !this.plot.data;
      const config = { ...CONFIG, toImageButtonOptions: { filename: this.title } };
      await Plotly.react(this.plot, drawn(this, logarithmic), layout(this, logarithmic), config);
      if (!first) return;
      this.plot.on("plotly_hover", ({ points }) => follow(this, points[0].x));
      this.plot.on("plotly_unhover", () => follow(this, null));
      this.plot.on("plotly_doubleclick", () => zoom(...whole));
      this.plot.on("plotly_relayout", (change) => zoom(change["xaxis.range[0]"], change["xaxis.range[1]"]));
    }

    // The legend's values at a step; null: the last ones.
    tell(x) {
      [...this.figure.querySelectorAll(".legend .value")].forEach((entry, s) => {
        const trace = this.data[s], i = x === null ? trace.x.length - 1 : nearest(trace.x, x);
        const values = trace.meta.smooth && slider.value > 0 ? smoothed(trace.y, Number(slider.value)) : trace.y;
        const band = trace.customdata && i >= 0 ? trace.customdata[i].map((each) => number(each, this.unit)).join(" … ") : "";
        const middle = trace.customdata && !trace.meta.smooth ? "" : number(values[i], this.unit);
        entry.textContent = middle && band ? `${middle} (${band})` : middle || band;
        entry.title = `step ${trace.x[i]}`;
      });
    }

    key(event) {
      const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!direction || !this.plot.data) return;
      event.preventDefault();
      const xs = [...new Set(this.data.filter((trace) => !trace.meta.mark).flatMap((trace) => trace.x))].sort((a, b) => a - b);
      this.at = Math.max(0, Math.min(xs.length - 1, (this.at ?? (direction > 0 ? -1 : xs.length)) + direction));
      follow(null, xs[this.at]);
    }

    fillTable() {
      this.details.querySelector(".data")?.remove();
      if (!this.details.open) return;
      const columns = this.data.filter((trace) => !trace.meta.mark && !hidden.has(trace.meta.run)).map((trace) => new Map(
        trace.x.map((x, i) => [x, [trace.y[i] ?? "–", ...(trace.customdata ? [trace.customdata[i].join(" … ")] : [])].join(" | ")])));
      const element = (name, ...children) => { const made = document.createElement(name); made.append(...children); return made; };
      const names = [...this.figure.querySelectorAll(".legend > span")].filter((span) => !span.hidden).map((span) => span.title);
      const xs = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b);
      const head = element("tr", ...["step", ...names].map((name) => element("th", name)));
      const rows = xs.map((x) => element("tr", element("th", x), ...columns.map((column) => element("td", column.get(x) ?? ""))));
      const table = element("div", element("table", element("thead", head), element("tbody", ...rows)));
      table.className = "data";
      table.tabIndex = 0;
      this.details.append(table);
    }
  }

  if (!window.Plotly) {
    for (const figure of document.querySelectorAll("figure.chart")) figure.append("The chart needs plotly.min.js beside this page.");
    return;
  }
  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
  const ends = charts.flatMap(({ data }) => data.filter(({ meta, x }) => x.length && !meta.mark).flatMap(
    ({ x, type }) => (type === "bar" ? [x[0] - 0.5, x.at(-1) + 0.5] : [x[0], x.at(-1)])));
  const whole = [ends.reduce((a, b) => Math.min(a, b), Infinity), ends.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (whole[0] === whole[1]) { whole[0] -= 0.5; whole[1] += 0.5; }
  const steps = [...whole]; // what of them is in view

  function redraw() {
    for (const chart of charts) { chart.stale = true; chart.draw(); chart.tell(null); chart.fillTable(); }
  }

  function zoom(from, to) {
    if (from === undefined) return;
    [steps[0], steps[1]] = [from, to];
    redraw();
  }

  // The cursor is at a step of one chart, or of none: it goes there in the others in view, whose own events then mean nothing.
  function follow(chart, x) {
    if (following) return;
    following = true;
    for (const other of charts.filter(({ visible, plot }) => visible && plot.data)) {
      other.tell(x);
      if (other === chart) continue;
      if (x === null) Plotly.Fx.unhover(other.plot); else Plotly.Fx.hover(other.plot, { xval: x }, "xy");
    }
    following = false;
  }

  const views = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const chart = charts.find(({ figure }) => figure === entry.target);
    chart.visible = entry.isIntersecting;
    chart.draw();
  }), { rootMargin: "400px" });
  charts.forEach(({ figure }) => views.observe(figure));
  addEventListener("beforeprint", () => charts.forEach((chart) => { chart.visible = true; chart.draw(); }));
  dark.addEventListener("change", redraw);
  for (const button of document.querySelectorAll("button.run")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", String(!hidden.has(run)));
      for (const entry of document.querySelectorAll(`.legend > [data-run="${run}"]`)) entry.hidden = hidden.has(run);
      redraw();
    });
  }
  log.checked = false;
  slider.value = 0;
  log.addEventListener("change", redraw);
  slider.addEventListener("input", () => {
    document.querySelector("output").textContent = slider.value > 0 ? Number(slider.value).toFixed(2) : "off";
    redraw();
  });
})();
