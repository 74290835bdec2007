// Pages through the samples in <div class="samples">: by run, kind and step, in three orders, with a search. Text is set as text.
"use strict";
(() => {
  const PAGE = 10;
  const ORDERS = [["as sampled", null], ["best reward first", -1], ["worst reward first", 1]];

  function html(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function choice(label, options) {
    const made = html("select", { "aria-label": label });
    options.forEach((text, i) => made.append(html("option", { value: i }, text)));
    made.hidden = options.length < 2;
    return made;
  }

  function show(container) {
    const { files, prompts } = JSON.parse(container.querySelector(".samples-data").textContent);
    const runs = JSON.parse(document.querySelector(".runs-data").textContent);
    const present = [...new Set(files.map((file) => file.run))];
    const kinds = [...new Set(files.map((file) => file.kind))];
    const run = choice("run", present.map((i) => runs[i]));
    const kind = choice("kind", kinds);
    const step = html("select", { "aria-label": "step" });
    const order = choice("order", ORDERS.map(([text]) => text));
    const search = html("input", { type: "search", placeholder: "search prompts and completions", "aria-label": "search" });
    const earlier = html("button", { type: "button", "aria-label": "earlier samples" }, "‹");
    const later = html("button", { type: "button", "aria-label": "later samples" }, "›");
    const count = html("span", { class: "count", role: "status" });
    const list = html("div");
    container.append(html("div", { class: "bar" }, run, kind, step, order, search, earlier, later, count), list);
    let page = 0;

    function chosenFiles() {
      return files.filter((file) => file.run === present[run.value] && file.kind === kinds[kind.value]);
    }

    function fillSteps() {
      const all = chosenFiles();
      step.replaceChildren(...all.map((file, i) => html("option", { value: i }, `step ${file.step}`)), html("option", { value: -1 }, "all steps"));
      step.value = all.length - 1;
    }

    function matching() {
      const asked = search.value.toLowerCase();
      const chosen = Number(step.value) < 0 ? chosenFiles() : chosenFiles().slice(Number(step.value), Number(step.value) + 1);
      const found = chosen.flatMap((file) => file.samples.map((sample) => ({ step: file.step, ...sample, prompt: prompts[sample.prompt] })));
      const kept = found.filter((sample) => [sample.prompt, ...said(sample)].join("\n").toLowerCase().includes(asked));
      const sign = ORDERS[order.value][1];
      return { of: chosen.reduce((sum, file) => sum + file.of, 0), kept: sign ? kept.sort((a, b) => sign * (a.reward - b.reward)) : kept };
    }

    function render() {
      const { kept, of } = matching();
      page = Math.max(0, Math.min(page, Math.ceil(kept.length / PAGE) - 1));
      const shown = kept.slice(page * PAGE, (page + 1) * PAGE);
      const range = shown.length ? `${page * PAGE + 1} to ${page * PAGE + shown.length} of ${kept.length}` : "none";
      count.textContent = `${range}${search.value ? " found" : ""}; sampled in ${Number(step.value) < 0 ? "these steps" : "this step"}: ${of}`;
      earlier.disabled = page === 0;
      later.disabled = (page + 1) * PAGE >= kept.length;
      list.replaceChildren(...shown.map(article));
    }

    // All texts that follow the prompt.
    function said(sample) {
      return sample.turns ? sample.turns.flat() : [sample.completion];
    }

    // What the policy said and what it was then told, one after another; a single answer as it is.
    function answer(sample) {
      if (!sample.turns) return html("pre", {}, sample.completion);
      const turn = (kind, name, text) => html("div", { class: `turn ${kind}` }, html("span", {}, name), html("pre", {}, text));
      return html("div", {}, ...sample.turns.flatMap(([own, told], i) => {
        const shown = [turn("own", `turn ${i + 1}, the policy`, own)];
        if (told) shown.push(turn("told", "the environment", told));
        return shown;
      }));
    }

    function article(sample) {
      const fact = (name, value) => html("span", {}, `${name} `, html("b", {}, String(value)));
      const facts = [fact("reward", sample.reward), fact("step", sample.step), ...sample.facts.map(([name, value]) => fact(name, value))];
      const texts = html("div", { class: "texts" }, html("pre", { class: "prompt" }, sample.prompt), answer(sample));
      return html("article", {}, html("div", { class: "facts" }, ...facts), texts);
    }

    const again = () => { page = 0; render(); };
    for (const select of [run, kind]) select.addEventListener("change", () => { fillSteps(); again(); });
    for (const control of [step, order]) control.addEventListener("change", again);
    search.addEventListener("input", again);
    earlier.addEventListener("click", () => { page--; render(); });
    later.addEventListener("click", () => { page++; render(); });
    fillSteps();
    render();
  }

  document.querySelectorAll(".samples").forEach(show);
})();
