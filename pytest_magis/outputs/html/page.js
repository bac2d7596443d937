"use strict";
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const data = JSON.parse(document.getElementById("data").textContent);

  function bytes(count) {
    let unit = 0;
    while (unit < UNITS.length - 1 && Number(count.toFixed(2)) >= 1024) { count /= 1024; unit += 1; }
    return (unit ? count.toFixed(2) : String(count)) + " " + UNITS[unit];
  }

  // The place of the last call that has started by then: what is in memory at that moment. Starts are sorted.
  function callAt(line, ms) {
    let low = 0;
    let high = line.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (line[middle][0] <= ms) { low = middle; } else { high = middle - 1; }
    }
    return low;
  }

  function follow(svg, curve) {
    const view = svg.viewBox.baseVal;
    const output = svg.closest("figure").querySelector("output");
    const cross = document.createElementNS(SVG, "line");
    cross.setAttribute("class", "cross");
    cross.setAttribute("y2", view.height);
    cross.setAttribute("visibility", "hidden");
    svg.appendChild(cross);
    let at = curve.end / 2;

    function show(ms) {
      at = Math.min(curve.end, Math.max(0, ms));
      const x = view.width * at / curve.axis;
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.setAttribute("visibility", "visible");
      output.replaceChildren();
      for (const name of Object.keys(curve.lines)) {
        if (!curve.lines[name].length) { continue; }
        const place = callAt(curve.lines[name], at);
        const call = curve.lines[name][place];
        const kinds = curve.kinds[name]
          .map(function ([kind, held]) { return [kind, Array.isArray(held) ? held[place] : held]; })
          .filter(function ([, held]) { return held > 0; })
          .map(function ([kind, held]) { return kind + " " + bytes(held); });
        const row = document.createElement("div");
        row.className = "key " + name;
        // as text: names are not ours
        row.textContent = at.toFixed(3) + " ms, " + name + ": " + bytes(call[2]) + " during " + curve.names[call[3]] +
          (kinds.length ? ": " + kinds.join(", ") : "");
        output.appendChild(row);
      }
    }

    svg.addEventListener("pointermove", function (event) {
      const box = svg.getBoundingClientRect();
      show((event.clientX - box.left) / box.width * curve.axis);
    });
    svg.addEventListener("keydown", function (event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); show(at + step * curve.end / 200); }
    });
    svg.addEventListener("focus", function () { show(at); });
  }

  let curves = 0;
  for (const svg of document.querySelectorAll("svg.curve")) {
    const curve = data.curves[Number(svg.dataset.curve)];
    if (curve) { follow(svg, curve); curves += 1; }
  }

  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", function () {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  const only = document.getElementById("only-red");
  only.hidden = false;
  only.addEventListener("click", function () {
    const on = document.querySelector("main").classList.toggle("only-red");
    only.setAttribute("aria-pressed", String(on));
  });
  document.getElementById("status").textContent =
    curves + " curves: point at one, or focus it and use the arrow keys, to see what runs and what is in memory.";
}());
