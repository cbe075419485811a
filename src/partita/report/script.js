// Draws the figures in the page's colours, again whenever a choice or the theme changes.
"use strict";
(async () => {
  // Long texts are compressed and in base 85 (RFC 1924, with .:, for <>&).
  function unpacked(text) {
    const signs = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;.=:?@^_`{|}~";
    const values = new Uint8Array(128), bytes = new Uint8Array(Math.ceil(text.length / 5) * 4);
    [...signs].forEach((sign, i) => { values[sign.charCodeAt(0)] = i; });
    for (let i = 0, k = 0; i < text.length; i += 5, k += 4) {
      let word = 0;
      for (let j = i; j < i + 5; j++) word = word * 85 + (j < text.length ? values[text.charCodeAt(j)] : 84);
      bytes[k] = word >>> 24; bytes[k + 1] = word >>> 16; bytes[k + 2] = word >>> 8; bytes[k + 3] = word;
    }
    return bytes.subarray(0, Math.floor(text.length / 5) * 4 + Math.max(0, (text.length % 5) - 1));
  }

  async function read(id) {
    const { type, textContent: text } = document.getElementById(id);
    if (type !== "text/plain") return text;
    const stream = new Blob([unpacked(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }

  async function load() {
    const script = document.createElement("script");
    script.textContent = await read("plotly");
    document.head.append(script);
  }

  const figures = JSON.parse(await read("figures"));
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
    if (!window.Plotly) return; // not yet there: it draws when it is
    for (const place of places) {
      const figure = figures[place.dataset.figure];
      const traces = figure.data.filter((t) => fits(t.when)).map(({ when, ...t }) => painted(t));
      const shown = layout(figure);
      if (!traces.length) shown.annotations = [{ text: "nothing to compare with", showarrow: false }];
      Plotly.react(place, traces, shown, options);
    }
    root.dataset.drawn = "";
  }

  // ---- every client: a table to sort and to search

  if (document.getElementById("rows")) {
    const { names, heat, changes, rows, up, file } = JSON.parse(await read("rows"));
    const table = document.getElementById("matrix"), find = document.getElementById("find");
    const more = document.getElementById("more"), status = document.getElementById("shown");
    const mean = (row) => {
      const known = heat.map((k) => row[k]).filter((x) => x !== null);
      return known.length ? known.reduce((a, b) => a + b, 0) / known.length : 0;
    };
    const away = rows.flatMap((row) => heat.map((k) => (row[k] === null ? 0 : Math.abs(row[k] - mean(row)))));
    const widest = away.sort((a, b) => a - b)[Math.floor(0.95 * (away.length - 1))] || 1;
    let by = 0, down = false, count = 100;

    // names with numbers in them in the order of the numbers; what is missing comes last
    const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
    function listed() {
      const word = find.value.trim().toLowerCase();
      const found = rows.filter((row) => row[0].toLowerCase().includes(word));
      return found.sort((a, b) => (a[by] === null) - (b[by] === null) || (down ? -1 : 1) * compare(a[by], b[by]));
    }

    function element(name, text, parent) {
      const e = parent.appendChild(document.createElement(name));
      e.textContent = text;
      return e;
    }

    function cell(row, k, line) {
      const x = row[k], e = element("td", k === 0 ? x : x === null ? "–" : "", line);
      e.className = k === 0 ? "word" : "num";
      if (k === 0 || x === null) return;
      const change = changes.includes(k), coloured = change || heat.includes(k);
      e.textContent = coloured ? (change && x > 0 ? "+" : "") + x.toFixed(Math.abs(x) < 100 ? 4 : 1).replace("-", "−") : x.toLocaleString("en");
      if (!coloured) return;
      const off = change ? x : (x - mean(row)) * (up ? 1 : -1), share = Math.min(1, Math.abs(off) / widest);
      if (share > 0.02) e.style.background = `color-mix(in srgb, var(--${off > 0 ? "gain" : "hurt"}) ${Math.round(45 * share)}%, transparent)`;
    }

    function fill() {
      const found = listed();
      table.replaceChildren();
      const head = element("tr", "", element("thead", "", table)), body = element("tbody", "", table);
      names.forEach((name, k) => {
        const th = element("th", "", head), button = element("button", name, th);
        th.className = k === 0 ? "word" : "num";
        th.ariaSort = k === by ? (down ? "descending" : "ascending") : "none";
        button.type = "button";
        button.addEventListener("click", () => { down = k === by ? !down : k > 0; by = k; fill(); });
      });
      for (const row of found.slice(0, count)) {
        const line = element("tr", "", body);
        names.forEach((_, k) => cell(row, k, line));
      }
      more.hidden = found.length <= count;
      status.textContent = `${Math.min(count, found.length).toLocaleString("en")} of ${found.length.toLocaleString("en")} clients`;
    }

    find.addEventListener("input", () => { count = 100; fill(); });
    more.addEventListener("click", () => { count += 500; fill(); });
    document.getElementById("download").addEventListener("click", () => {
      // a cell that begins as a formula would be one in a spreadsheet
      const quote = (x) => x === null ? "" : typeof x === "number" ? x : `"${(/^[=+\-@\t\r]/.test(x) ? "'" : "") + x.replaceAll('"', '""')}"`;
      const text = [names, ...listed()].map((row) => row.map(quote).join(",")).join("\n") + "\n";
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      link.download = file;
      link.click();
      URL.revokeObjectURL(link.href);
    });
    fill();
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
  load().then(draw, () => {
    for (const place of places) place.textContent = "This browser is too old to draw figures.";
  });
})();
