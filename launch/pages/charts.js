// Draws each <figure class="chart"> from the JSON inside it. All charts share the cursor, the hidden runs, the scale and the
// smoothing; those with the same x label share the x axis. Text is set as text, never as markup.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = 8;
  const NAMED = 3; // more runs than this are told apart by colour in a legend
  const HEIGHT = 210;
  const ROOM = { left: 52, right: 12, top: 8, bottom: 22 };
  const runs = JSON.parse(document.querySelector(".runs-data").textContent);
  const hidden = new Set();
  let logarithmic = false;
  let smoothing = 0;

  function element(name, attributes = {}, ...children) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function html(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // ---- numbers --------------------------------------------------------------------------------------------------------

  const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  function number(value, unit, digits = 4) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const [factor, prefix] = PREFIXES.find(([each]) => size >= each && (unit === "B" || size >= 1e5)) || [1, ""];
    if (factor > 1) return `${plain(value / factor, digits)} ${prefix}${unit}`.trim();
    if (unit === "s" && size > 0 && size < 0.1) return `${plain(value * 1e3, digits)} ms`;
    return `${plain(value, digits)} ${unit}`.trim();
  }

  function plain(value, digits) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) return value.toExponential(digits - 2).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(digits)));
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }

  function powers(low, high) {
    const found = [];
    const every = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / 5));
    for (let e = Math.ceil(Math.log10(low) - 1e-9); 10 ** e <= high * 1.000001; e += every) found.push(10 ** e);
    return found.length > 1 ? found : [low, Math.sqrt(low * high), high];
  }

  // Exponential moving average without the bias towards its start, as TensorBoard's.
  function smooth(values) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * smoothing + value * (1 - smoothing);
      weight = weight * smoothing + (1 - smoothing);
      return sum / weight;
    });
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
  }

  // ---- one chart ------------------------------------------------------------------------------------------------------

  class Chart {
    constructor(figure) {
      this.figure = figure;
      Object.assign(this, JSON.parse(figure.querySelector(".chart-data").textContent));
      this.series.forEach((series, i) => {
        series.y = series.y || [];
        series.colour = this.stacked ? i : series.run;
        series.like = this.series.slice(0, i).filter((other) => other.run === series.run && other.kind === "line").length;
      });
      this.legend = html("div", { class: "legend" });
      this.svg = element("svg", { role: "img", tabindex: "0" });
      this.details = html("details", {}, html("summary", {}, "data"));
      figure.append(this.legend, this.svg, this.details);
      this.entries = this.series.map((series) => this.entry(series));
      this.details.addEventListener("toggle", () => this.fillTable());
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => moveCursor(null, null));
      this.svg.addEventListener("keydown", (event) => this.key(event));
      this.svg.addEventListener("blur", () => moveCursor(null, null));
    }

    label(series) {
      if (this.stacked) return series.name; // of one run, which the title names
      const run = runs.length > 1 ? runs[series.run] : "";
      const alone = this.series.every((other) => other.name === series.name);
      return [run, alone ? "" : series.name].filter(Boolean).join(" ");
    }

    entry(series) {
      const kind = series.kind === "points" ? " points" : series.colour >= COLOURS ? " dashed" : "";
      const value = html("b");
      const label = this.label(series);
      const text = label && (runs.length <= NAMED || this.stacked) ? `${label} ` : ""; // of many runs the toolbar has the names
      const swatch = html("span", { class: `swatch c${series.colour % COLOURS}${kind}` });
      const entry = html("span", { title: label }, swatch, text, value);
      this.legend.append(entry);
      return { entry, value };
    }

    visible() {
      return this.series.filter((series) => !hidden.has(series.run));
    }

    // The values to draw: smoothed, stacked, and without what a logarithm does not have.
    prepare() {
      const below = new Map();
      for (const series of this.series) {
        series.drawn = smoothing > 0 && series.kind !== "points" && !this.stacked ? smooth(series.y) : series.y;
        if (!this.stacked) continue;
        series.base = series.x.map((x) => below.get(x) || 0);
        series.top = series.x.map((x, i) => series.base[i] + (series.y[i] || 0));
        series.x.forEach((x, i) => below.set(x, series.top[i]));
      }
    }

    range() {
      let low = Infinity, high = -Infinity;
      const take = (value) => {
        if (value === null || (this.log && value <= 0)) return;
        low = Math.min(low, value);
        high = Math.max(high, value);
      };
      for (const series of this.visible()) {
        if (this.stacked) { take(0); series.top.forEach(take); continue; }
        series.y.forEach(take);
        (series.low || []).forEach(take);
        (series.high || []).forEach(take);
      }
      if (low > high) return null;
      this.levels.forEach((level) => take(level.y));
      if (low === high) return this.log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
      if (this.log) return [low / 1.1, high * 1.1];
      const least = 1e-4 * Math.max(Math.abs(low), Math.abs(high)); // what is less is rounding, and its ticks would not fit
      if (high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
      const room = (high - low) * 0.06;
      return [this.stacked || (low >= 0 && low < room) ? Math.min(low, 0) : low - room, high + room];
    }

    draw() {
      this.width = Math.max(240, Math.round(this.svg.getBoundingClientRect().width) || 400);
      this.log = logarithmic && !this.stacked;
      this.prepare();
      let range = this.range();
      if (!range && this.log) { this.log = false; range = this.range(); } // nothing above 0
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
      this.svg.setAttribute("aria-label", this.summary());
      const spread = spreads.get(this.x_label);
      if (!range || !Number.isFinite(spread[0])) { // nothing but gaps, or every run is hidden
        this.cursor = null;
        this.svg.append(element("text", { class: "tick", x: this.width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to draw"));
        return this.tell(null);
      }
      const [first, last] = spread[0] === spread[1] ? [spread[0] - 0.5, spread[1] + 0.5] : spread;
      const [low, high] = range;
      const scale = this.log ? Math.log10 : (value) => value;
      this.px = (x) => ROOM.left + (x - first) / (last - first) * (this.width - ROOM.left - ROOM.right);
      this.xp = (p) => first + (p - ROOM.left) / (this.width - ROOM.left - ROOM.right) * (last - first);
      this.py = (y) => HEIGHT - ROOM.bottom - (scale(y) - scale(low)) / (scale(high) - scale(low)) * (HEIGHT - ROOM.top - ROOM.bottom);
      this.drawAxes(first, last, low, high);
      for (const series of this.visible()) this.drawSeries(series);
      for (const level of this.levels) this.drawLevel(level);
      for (const mark of this.marks) if (!hidden.has(mark.run)) this.drawMark(mark);
      this.cursor = element("line", { class: "cursor", y1: ROOM.top, y2: HEIGHT - ROOM.bottom, visibility: "hidden" });
      this.svg.append(this.cursor);
      this.tell(null);
    }

    drawAxes(first, last, low, high) {
      const end = this.width - ROOM.right, ground = HEIGHT - ROOM.bottom;
      const ys = this.log ? powers(low, high) : ticks(low, high, 5);
      const digits = Math.max(3, Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / (high - low))) + 2); // to tell them apart
      for (const y of ys) {
        const p = this.py(y);
        this.svg.append(
          element("line", { class: "axis", x1: ROOM.left, x2: end, y1: p, y2: p }),
          element("text", { class: "tick", x: ROOM.left - 6, y: p + 4, "text-anchor": "end" }, number(y, this.unit === "B" ? "B" : "", digits)));
      }
      const marks = ticks(first, last, Math.max(2, Math.floor(this.width / 90)));
      for (const x of marks) {
        const label = element("text", { class: "tick", x: this.px(x), y: ground + 15, "text-anchor": "middle" }, plain(x, 6));
        this.svg.append(element("line", { class: "axis", x1: this.px(x), x2: this.px(x), y1: ground, y2: ground + 4 }), label);
      }
      this.svg.append(element("line", { class: "axis", x1: ROOM.left, x2: end, y1: ground, y2: ground }));
    }

    drawSeries(series) {
      const colour = `c${series.colour % COLOURS}`;
      const style = series.colour >= COLOURS && !this.stacked ? " dashed" : ` like${series.like % 4}`;
      if (this.stacked) return this.svg.append(element("path", { class: `layer ${colour}`, d: this.steps(series) }));
      if (series.low) this.svg.append(element("path", { class: `band ${colour}`, d: this.area(series.x, series.low, series.high) }));
      if (series.kind === "points") {
        this.svg.append(element("path", { class: `series joining ${colour}`, d: this.line(series.x, series.y) }));
        series.x.forEach((x, i) => {
          if (this.drawable(series.y[i])) this.svg.append(element("circle", { class: `dot ${colour}`, cx: this.px(x), cy: this.py(series.y[i]), r: 3 }));
        });
      } else if (series.y.length) {
        if (series.drawn !== series.y) this.svg.append(element("path", { class: `series faint ${colour}`, d: this.line(series.x, series.y) }));
        this.svg.append(element("path", { class: `series ${colour}${style}`, d: this.line(series.x, series.drawn) }));
      }
    }

    drawable(value) {
      return value !== null && value !== undefined && !(this.log && value <= 0);
    }

    at(x, y) {
      return `${this.px(x).toFixed(1)} ${this.py(y).toFixed(1)}`;
    }

    line(xs, ys) {
      let path = "", open = false;
      xs.forEach((x, i) => {
        if (this.drawable(ys[i])) path += open ? `L${this.at(x, ys[i])}` : `M${this.at(x, ys[i])}h0`; // h0: a point alone is a dot
        open = this.drawable(ys[i]);
      });
      return path;
    }

    // Between two lines; a bottom that a logarithm does not have is the chart's.
    area(xs, bottom, top) {
      let path = "", from = 0;
      const close = (to) => {
        if (to > from) {
          const there = [], back = [];
          for (let i = from; i < to; i++) {
            there.push(this.at(xs[i], top[i]));
            back.unshift(this.drawable(bottom[i]) ? this.at(xs[i], bottom[i]) : `${this.px(xs[i]).toFixed(1)} ${HEIGHT - ROOM.bottom}`);
          }
          path += `M${there.join("L")}L${back.join("L")}Z`;
        }
        from = to + 1;
      };
      xs.forEach((_, i) => { if (!this.drawable(top[i])) close(i); });
      close(xs.length);
      return path;
    }

    // A layer of a stack: each value holds from halfway to the one before to halfway to the one after.
    steps(series) {
      const { x, base, top } = series;
      const [first, last] = [this.xp(ROOM.left), this.xp(this.width - ROOM.right)];
      const there = [], back = [];
      x.forEach((_, i) => {
        const from = i ? (x[i - 1] + x[i]) / 2 : Math.max(first, x[i] - 0.5);
        const to = i < x.length - 1 ? (x[i] + x[i + 1]) / 2 : Math.min(last, x[i] + 0.5);
        there.push(this.at(from, top[i]), this.at(to, top[i]));
        back.push(this.at(from, base[i]), this.at(to, base[i]));
      });
      return there.length ? `M${there.join("L")}L${back.reverse().join("L")}Z` : "";
    }

    drawLevel(level) {
      const p = this.py(level.y);
      if (!Number.isFinite(p)) return;
      this.svg.append(
        element("line", { class: "level", x1: ROOM.left, x2: this.width - ROOM.right, y1: p, y2: p }),
        element("text", { class: "tick", x: this.width - ROOM.right, y: p - 3, "text-anchor": "end" }, level.label));
    }

    drawMark(mark) {
      const p = this.px(mark.x), ground = HEIGHT - ROOM.bottom;
      const flag = element("path", { class: "flag", d: `M${p - 5} ${ground + 8}L${p + 5} ${ground + 8}L${p} ${ground}Z` });
      const line = element("line", { class: "mark", x1: p, x2: p, y1: ROOM.top, y2: ground });
      this.svg.append(element("g", { class: `c${mark.run % COLOURS}` }, element("title", {}, `${mark.x}: ${mark.label}`), line, flag));
    }

    // ---- reading values ---------------------------------------------------------------------------------------------

    summary() {
      const parts = this.visible().map((series) => {
        const values = series.y.filter((value) => value !== null);
        const span = values.length ? `from ${number(values[0], this.unit)} to ${number(values.at(-1), this.unit)}` : "a band";
        return `${this.label(series)} ${span}`;
      });
      return `${this.title}: ${parts.join("; ")}`;
    }

    // The legend's values: at x, or the last ones.
    tell(x) {
      if (this.cursor) {
        const inside = x !== null && x >= this.xp(ROOM.left) - 1e-9 && x <= this.xp(this.width - ROOM.right) + 1e-9;
        this.cursor.setAttribute("visibility", inside ? "visible" : "hidden");
        if (inside) { this.cursor.setAttribute("x1", this.px(x)); this.cursor.setAttribute("x2", this.px(x)); }
      }
      this.series.forEach((series, s) => {
        const { entry, value } = this.entries[s];
        entry.hidden = hidden.has(series.run);
        const drawn = this.stacked ? series.y : series.drawn;
        const i = x === null ? series.x.length - 1 : nearest(series.x, x);
        const middle = drawn.length ? number(drawn[i], this.unit) : "";
        const band = series.low ? `${number(series.low[i], this.unit)} … ${number(series.high[i], this.unit)}` : "";
        value.textContent = [middle, middle && band ? `(${band})` : band].filter(Boolean).join(" ");
        value.title = `${this.x_label} ${series.x[i]}`;
      });
    }

    point(event) {
      const box = this.svg.getBoundingClientRect();
      this.moveTo(this.xp((event.clientX - box.left) * this.width / box.width));
    }

    moveTo(x) {
      const candidates = this.visible().filter((series) => series.x.length).map((series) => series.x[nearest(series.x, x)]);
      if (!candidates.length) return;
      this.here = candidates.reduce((best, each) => Math.abs(each - x) < Math.abs(best - x) ? each : best);
      moveCursor(this.here, this.x_label);
    }

    key(event) {
      const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") return moveCursor(null, null);
      if (!direction) return;
      event.preventDefault();
      const xs = [...new Set(this.visible().flatMap((series) => series.x))].sort((a, b) => a - b);
      if (!xs.length) return;
      const now = this.here === undefined ? (direction > 0 ? -1 : xs.length) : nearest(xs, this.here);
      this.moveTo(xs[Math.min(xs.length - 1, Math.max(0, now + direction))]);
    }

    fillTable() {
      this.details.querySelector(".data")?.remove();
      if (!this.details.open) return;
      const columns = this.visible().flatMap((series) => [
        ...(series.y.length ? [[this.label(series), series.x, series.y]] : []),
        ...(series.low ? [[`${this.label(series)} low`, series.x, series.low], [`${this.label(series)} high`, series.x, series.high]] : []),
      ]);
      const maps = columns.map(([, xs, ys]) => new Map(xs.map((x, i) => [x, ys[i]])));
      const xs = [...new Set(columns.flatMap(([, each]) => each))].sort((a, b) => a - b);
      const head = html("tr", {}, ...[this.x_label, ...columns.map(([label]) => label || this.title)].map((label) => html("th", { scope: "col" }, label)));
      const rows = xs.map((x) => html("tr", {}, html("th", { scope: "row" }, String(x)), ...maps.map((map) => html("td", {}, map.has(x) ? String(map.get(x) ?? "–") : ""))));
      this.details.append(html("div", { class: "data", tabindex: "0" }, html("table", {}, html("thead", {}, head), html("tbody", {}, ...rows))));
    }
  }

  // ---- all charts -----------------------------------------------------------------------------------------------------

  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
  const spreads = new Map(); // x label -> [least, greatest]
  for (const chart of charts) {
    const [low, high] = spreads.get(chart.x_label) || [Infinity, -Infinity];
    const room = chart.stacked ? 0.5 : 0; // a layer's first and last value are half a step wider
    const ends = chart.series.filter((series) => series.x.length).flatMap((series) => [series.x[0] - room, series.x.at(-1) + room]);
    spreads.set(chart.x_label, [Math.min(low, ...ends), Math.max(high, ...ends)]);
  }
  const redraw = () => charts.forEach((chart) => { chart.draw(); chart.fillTable(); });

  function moveCursor(x, label) {
    for (const chart of charts) chart.tell(chart.x_label === label ? x : null);
  }

  for (const button of document.querySelectorAll("button.run")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", String(!hidden.has(run)));
      redraw();
    });
  }
  const log = document.getElementById("log"), slider = document.getElementById("smoothing");
  log.checked = false;
  slider.value = 0;
  log.addEventListener("change", () => { logarithmic = log.checked; redraw(); });
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    document.querySelector("output").textContent = smoothing ? smoothing.toFixed(2) : "off";
    redraw();
  });
  new ResizeObserver(() => charts.forEach((chart) => {
    const width = Math.round(chart.svg.getBoundingClientRect().width);
    if (width && width !== chart.width) chart.draw();
  })).observe(document.body);
  document.addEventListener("toggle", (event) => {
    if (event.target.querySelector(".charts")) redraw(); // what was folded had no width
  }, true);
  redraw();
})();
