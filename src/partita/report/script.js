// Draws the figures in the page's colours, again whenever a choice or the theme changes.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const places = [...document.querySelectorAll("[data-figure]")];
  const buttons = [...document.querySelectorAll("[data-choice]")];
  const chosen = {};
  for (const b of buttons) if (b.ariaPressed === "true") chosen[b.dataset.choice] ??= b.dataset.value;

  // ---- colours

  function colour(name) {
    const [key, opacity] = name.split("/"), style = getComputedStyle(root);
    const hex = style.getPropertyValue(/^\d/.test(key) ? `--c${key}` : `--${key}`).trim();
    if (!opacity) return hex;
    const part = (i) => parseInt(hex.slice(i, i + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${opacity})`;
  }

  // Only where figures.py puts colours: a client's name may well begin with "@".
  const COLOURED = new Set(["color", "fillcolor"]);
  function painted(value, key) {
    if (typeof value === "string") return COLOURED.has(key) && value[0] === "@" ? colour(value.slice(1)) : value;
    if (!value || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, k)]));
  }

  // ---- figures

  // A choice that a page has no buttons for is no condition.
  function fits(when) {
    return Object.entries(when ?? {}).every(([k, v]) => !(k in chosen) || chosen[k] === v);
  }

  function layout(figure) {
    const views = Object.entries(figure.layouts ?? {}).filter(([key]) => {
      const [name, value] = key.split("=");
      return (chosen[name] ?? value) === value;
    });
    const own = Object.assign({}, figure.layout, ...views.map(([, l]) => l));
    const text = colour("text"), soft = colour("soft"), line = colour("line");
    const axis = (a) => ({
      gridcolor: line, linecolor: line, zeroline: false, zerolinecolor: soft, zerolinewidth: 1.5,
      automargin: true, tickfont: { color: soft }, ...a,
      title: { font: { size: 13, color: soft }, standoff: 10, ...a?.title },
    });
    return {
      ...own, xaxis: axis(own.xaxis), yaxis: axis(own.yaxis),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: text },
      hoverlabel: { bgcolor: colour("panel"), bordercolor: line, font: { color: text, size: 13 }, align: "left" },
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { color: text, size: 12 }, ...own.legend },
      margin: { l: 56, r: 12, t: 24, b: 48 },
      dragmode: touch ? false : "zoom", // a finger scrolls the page
    };
  }

  const options = {
    responsive: true, displayModeBar: false,
  };

  function draw() {
    for (const place of places) {
      const figure = figures[place.dataset.figure];
      const traces = figure.data.filter((t) => fits(t.when)).map(({ when, ...t }) => painted(t));
      const shown = layout(figure);
      if (!traces.length) shown.annotations = [{ text: "nothing to compare with", showarrow: false }];
      Plotly.react(place, traces, shown, options);
    }
  }

  // ---- choices and theme

  for (const button of buttons) {
    button.addEventListener("click", () => {
      chosen[button.dataset.choice] = button.dataset.value;
      for (const b of buttons)
        if (b.dataset.choice === button.dataset.choice)
          b.ariaPressed = String(b.dataset.value === button.dataset.value);
      draw();
    });
  }
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);
  draw();
})();
