// Draws each <figure class="drawing"> by Plotly as it is described, with axes of its own. Texts are escaped where they are made
// (figures.py).
"use strict";
(() => {
  if (!window.Plotly) return; // charts.js says so
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const drawings = [...document.querySelectorAll("figure.drawing")].map((figure) => {
    const plot = document.createElement("div");
    plot.className = "plot";
    figure.append(plot);
    return { plot, text: figure.querySelector(".drawing-data").textContent };
  });

  function draw() {
    const family = getComputedStyle(document.body).fontFamily, line = colour("--line");
    const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true };
    for (const { plot, text } of drawings) {
      const { data, layout } = JSON.parse(text.replace(/"var\((--\w+)\)"/g, (_, name) => JSON.stringify(colour(name))));
      Plotly.react(plot, data, {
        margin: { l: 60, r: 20, t: 20, b: 40 }, paper_bgcolor: colour("--panel"), plot_bgcolor: colour("--panel"),
        font: { family, size: 11, color: colour("--dim") }, showlegend: false, hovermode: "closest", dragmode: false,
        hoverlabel: { bgcolor: colour("--ground"), bordercolor: line, font: { color: colour("--text"), size: 12, family } },
        ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
      }, { responsive: true, displayModeBar: false });
    }
  }
  draw();
  dark.addEventListener("change", draw);
})();
