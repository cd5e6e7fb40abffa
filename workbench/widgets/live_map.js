// The live map: frames of one byte a cell (layout: frames.py) on a canvas, drawn once a picture.
//
// Properties: frame (bytes), spec (JSON: words and scale), ack (highest seq drawn), row and column
// (the cell cursor, -1 for none), view ("map" | "table"), theme ("auto" | "light" | "dark").

const HEAD_BYTES = 32;
const MAGIC = 0x314d5254; // "TRM1", little endian
const NO_DATA = 255;
const TOP = 254;
const TABLE_MS = 400; // a table that changes faster cannot be read
const FONT = '12px Inter, system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif';
const KEYS = [
  [["←", "→", "↑", "↓"], "move the cell cursor"],
  [["Home", "End"], "first, last cell of the row; with Ctrl of the map"],
  [["t"], "table of the same numbers, and back"],
  [["Esc"], "close this, leave the cell"],
  [["?"], "show this"],
];

function render({ model, el }) {
  const listen = listener(model);
  const title = element("h2");
  const tableButton = button("Table", "t", { click: () => swapView() });
  const helpButton = button("", "?", { "aria-label": "Keys and meaning", click: () => showHelp() });
  const bar = element("div", { class: "trw-bar" });
  const legend = element("div", { class: "trw-legend" });
  const canvas = element("canvas", {
    tabindex: "0", ...KEYS_ARE_OURS, role: "application", "aria-roledescription": "heat map",
  });
  const notice = element("div", { class: "trw-notice" }, element("span"));
  const picture = element("div", { class: "trw-picture" }, canvas, notice);
  const table = element("div", { class: "trw-table", tabindex: "0", ...KEYS_ARE_OURS, hidden: true });
  const value = element("span", { class: "trw-value" });
  const stamp = element("span", { class: "trw-stamp" });
  const spoken = element("span", { class: "trw-sr trw-said", role: "status", "aria-live": "polite" });
  const help = helpPanel("How to read this map", [
    "", "The scale is fixed: a colour means the same at any time, so a map on which little happens stays faint. "
    + "Hatched cells have no data.",
  ], KEYS);
  const root = element(
    "div", { class: "trw trw-map" },
    element("div", { class: "trw-head" }, title, element("div", { class: "trw-tools" }, tableButton, helpButton)),
    legend, picture, table,
    element("div", { class: "trw-foot" }, value, stamp), spoken, help,
  );
  el.append(root);

  let spec = {};
  let waiting = null; // the newest frame that is not drawn yet
  let shown = null; // the frame on the screen
  let queued = false;
  let looked = false;
  let hover = null;
  let layout = null;
  let colours = [];
  let hatch = null;
  let tableCells = null;
  const image = document.createElement("canvas");
  const pen = canvas.getContext("2d");

  // ---- frames

  function takeFrame() {
    const frame = frameOf(bytesOf(model.get("frame")));
    if (frame === null) return;
    // A lower seq with a later time is a source that began anew, not a frame that came late.
    const last = waiting ?? shown;
    if (last && frame.seq <= last.seq && frame.time <= last.time) return;
    waiting = frame;
    queue();
  }

  function queue() {
    if (queued) return;
    queued = true;
    if (isTable() && shown) setTimeout(draw, TABLE_MS);
    else if (document.hidden) setTimeout(draw, 0); // no pictures are drawn in a hidden tab
    else requestAnimationFrame(draw);
  }

  function draw() {
    if (!queued) return;
    queued = false;
    if (!root.isConnected) return; // once it is, its size changes, and that queues again
    if (!isTable() && !picture.clientWidth) {
      // A page that changes its theme may have no layout for a moment, too short for the observer
      // of the size; so look once more. Longer than that, the observer tells when it is back.
      if (!looked) setTimeout(queue, 250);
      looked = true;
      return;
    }
    looked = false;
    const fresh = waiting;
    if (fresh) [shown, waiting] = [fresh, null];
    if (isTable()) fillTable();
    else paint();
    write();
    if (fresh) {
      root.dataset.seq = fresh.seq;
      // Several views share one model: the fastest one's word counts, unless the source began anew.
      if (fresh.seq > model.get("ack") || fresh.seq === 1) keep(model, { ack: fresh.seq });
    }
  }

  // ---- the picture

  function measure() {
    const rows = shown?.rows ?? spec.rows?.length ?? 0;
    const columns = shown?.columns ?? spec.columns?.length ?? 0;
    const width = Math.max(180, picture.clientWidth);
    pen.font = FONT;
    const widest = rows ? Math.max(...range(rows).map((r) => pen.measureText(name("row", r)).width)) : 0;
    const left = Math.ceil(Math.min(160, widest)) + 10;
    const bottom = 22;
    // A page may give the picture a place to fill; what the spec wishes may come later than that.
    const given = (style("--fills-its-place") && picture.clientHeight) || spec.height;
    const high = given > 0 ? given - bottom : limited(rows * 34, 140, 366);
    const height = rows ? Math.max(rows * 2, given > 0 ? high : Math.min(high, rows * 46)) : 140;
    return { rows, columns, left, bottom, width: width - left, height, ratio: devicePixelRatio || 1 };
  }

  function paint() {
    const now = measure();
    layout = now;
    root.dataset.left = now.left; // where the cells begin
    const [wide, tall] = [now.left + now.width, now.height + now.bottom];
    const [pixelsWide, pixelsTall] = [Math.round(wide * now.ratio), Math.round(tall * now.ratio)];
    if (canvas.width !== pixelsWide || canvas.height !== pixelsTall) {
      [canvas.width, canvas.height] = [pixelsWide, pixelsTall];
      hatch = null;
    }
    canvas.style.height = `${tall}px`;
    pen.setTransform(now.ratio, 0, 0, now.ratio, 0, 0);
    pen.clearRect(0, 0, wide, tall);
    if (!shown || !now.rows || !now.columns) {
      pen.fillStyle = style("--sunken");
      pen.fillRect(now.left, 0, now.width, now.height);
      say("Waiting for the first frame");
      return;
    }
    paintCells(now);
    paintGaps(now);
    paintWords(now);
    paintAxes(now);
    for (const cell of [cursor(), hover]) if (cell) paintFrame(now, cell);
    const empty = shown.cells.every((cell) => cell === NO_DATA);
    const idle = !empty && shown.cells.every((cell) => cell === 0 || cell === NO_DATA);
    say(empty ? "No data" : idle ? spec.idle : "");
  }

  function paintCells({ left, width, height, rows, columns }) {
    [image.width, image.height] = [columns, rows];
    const brush = image.getContext("2d");
    const bits = brush.createImageData(columns, rows);
    shown.cells.forEach((cell, at) => {
      if (cell !== NO_DATA) bits.data.set([...colours[cell], 255], 4 * at);
    });
    brush.putImageData(bits, 0, 0);
    if (shown.cells.includes(NO_DATA)) {
      hatch ??= hatching(pen, style("--sunken"), style("--edge"));
      pen.fillStyle = hatch;
      pen.fillRect(left, 0, width, height);
    }
    pen.imageSmoothingEnabled = false;
    pen.drawImage(image, left, 0, width, height);
  }

  // Lines between cells, where the cells are big enough to spare them.
  function paintGaps({ left, width, height, rows, columns, ratio }) {
    pen.fillStyle = style("--surface");
    const thick = Math.min(width / columns, height / rows) >= 22 ? 2 : 1;
    const snap = (x) => Math.round(x * ratio) / ratio;
    if (width / columns >= 9) {
      for (let c = 1; c < columns; c++) {
        pen.fillRect(snap(left + (c * width) / columns - thick / 2), 0, thick, height);
      }
    }
    if (height / rows >= 7) {
      for (let r = 1; r < rows; r++) {
        pen.fillRect(left, snap((r * height) / rows - thick / 2), width, thick);
      }
    }
  }

  function paintWords({ left, width, height, rows, columns }) {
    if (width / columns < 42 || height / rows < 18) return;
    pen.font = FONT;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    shown.cells.forEach((cell, at) => {
      const [r, c] = [Math.floor(at / columns), at % columns];
      pen.fillStyle = cell === NO_DATA ? style("--muted") : INKS[root.dataset.theme][cell];
      pen.fillText(shortWord(cell), left + ((c + 0.5) * width) / columns, ((r + 0.5) * height) / rows + 1);
    });
  }

  function paintAxes({ left, width, height, rows, columns }) {
    const at = hover ?? cursor() ?? [-1, -1];
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const tick = (kind, n, x, y) => {
      const here = n === at[kind === "row" ? 0 : 1];
      pen.font = here ? `600 ${FONT}` : FONT;
      pen.fillStyle = style(here ? "--text" : "--muted");
      pen.fillText(name(kind, n), x, y);
    };
    const everyRow = Math.ceil(15 / (height / rows));
    for (const r of range(rows)) {
      if (r === at[0] || (r % everyRow === 0 && Math.abs(r - at[0]) >= everyRow) || (at[0] < 0 && r % everyRow === 0)) {
        tick("row", r, left - 8, limited(((r + 0.5) * height) / rows + 1, 7, height - 5));
      }
    }
    pen.textAlign = "center";
    const label = Math.max(...range(columns).map((c) => pen.measureText(name("column", c)).width)) + 10;
    const everyColumn = Math.ceil(Math.max(22, label) / (width / columns));
    for (const c of range(columns)) {
      if (c === at[1] || (c % everyColumn === 0 && (at[1] < 0 || Math.abs(c - at[1]) >= everyColumn))) {
        tick("column", c, left + ((c + 0.5) * width) / columns, height + 13);
      }
    }
  }

  // Two lines, one light and one dark, so that the frame shows on every colour.
  function paintFrame({ left, width, height, rows, columns }, [r, c]) {
    const [w, h] = [Math.max(11, width / columns), Math.max(11, height / rows)];
    const x = limited(left + ((c + 0.5) * width) / columns - w / 2, left, left + width - w);
    const y = limited(((r + 0.5) * height) / rows - h / 2, 0, height - h);
    pen.lineWidth = 2;
    pen.strokeStyle = style("--text");
    pen.strokeRect(x + 1, y + 1, w - 2, h - 2);
    pen.lineWidth = 1;
    pen.strokeStyle = style("--surface");
    pen.strokeRect(x + 2.5, y + 2.5, w - 5, h - 5);
  }

  // ---- words

  const scale = () => (shown ?? spec);
  const numberOf = (cell) => scale().low + (cell * (scale().high - scale().low)) / TOP;
  const name = (kind, n) => (kind === "row" ? spec.rows : spec.columns)?.[n] ?? String(n);

  // A number as exact as one byte allows: a multiple of the round number next above a step of the
  // scale. On a scale of 0 to 4 the cell of 3 stands for 2.992 and reads 3.00.
  function figure(number, fewer = 0) {
    const step = (scale().high - scale().low) / TOP;
    const power = Math.floor(Math.log10(step));
    const unit = [1, 2, 5, 10].find((times) => times * 10 ** power >= step) * 10 ** power;
    const digits = Math.max(0, (unit >= 10 ** (power + 1) ? -1 : 0) - power - fewer);
    return (Math.round(number / unit) * unit)
      .toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  function shortWord(cell) {
    if (cell === NO_DATA) return "–";
    const number = figure(numberOf(cell), 1);
    if (spec.low_word !== null && number === figure(scale().low, 1)) return spec.low_word;
    return (cell === TOP ? `≥${number}` : number) + spec.short_unit;
  }

  const exactWord = (cell) => `${cell === TOP ? "≥" : ""}${figure(numberOf(cell))}${spec.short_unit}`;

  function longWord(cell) {
    const unit = spec.unit ? ` ${spec.unit}` : "";
    if (cell === NO_DATA) return "no data";
    if (cell === TOP) return `${figure(scale().high)}${unit} or more`;
    const low = spec.marks?.find(([at]) => at === scale().low);
    return `${figure(numberOf(cell))}${unit}${cell === 0 && low ? `, ${low[1]}` : ""}`;
  }

  const cellLine = ([r, c], word = longWord) =>
    `${spec.row_name} ${name("row", r)}, ${spec.column_name} ${name("column", c)}: ${word(shown.cells[r * shown.columns + c])}`;

  function summary() {
    let best = -1;
    shown.cells.forEach((cell, at) => {
      if (cell !== NO_DATA && (best < 0 || cell > shown.cells[best])) best = at;
    });
    if (best < 0) return "No cell has data";
    if (shown.cells[best] === 0) return spec.idle;
    const word = (cell) => (spec.short_unit ? exactWord(cell) : longWord(cell));
    return `Highest: ${cellLine([Math.floor(best / shown.columns), best % shown.columns], word)}`;
  }

  function write() {
    if (!shown) return;
    const at = hover ?? cursor();
    const line = at ? cellLine(at) : summary();
    if (value.textContent !== line) value.textContent = line;
    stamp.textContent = `as of ${new Date(1000 * shown.time).toLocaleTimeString("en-GB")}`;
  }

  function say(words) {
    notice.hidden = !words;
    notice.firstChild.textContent = words;
  }

  function writeLegend() {
    const { low, high } = spec;
    const marks = (spec.marks?.length ? spec.marks : [[low, low.toLocaleString("en")], [high, `${high.toLocaleString("en")} or more`]]);
    const words = marks.map(([at, word]) => {
      const part = (100 * (at - low)) / (high - low);
      const edge = part === 0 ? "first" : part === 100 ? "last" : "";
      return element("span", { style: `left: ${part}%`, class: edge }, word);
    });
    legend.replaceChildren(
      element("div", { class: "trw-scale" }, bar, element("div", { class: "trw-marks" }, ...words)),
      element("span", { class: "trw-swatch" }), element("span", {}, "no data"),
      element("span", { class: "trw-axes" }, `↓ ${spec.row_name}  → ${spec.column_name}`),
    );
  }

  // ---- the table

  const isTable = () => model.get("view") === "table";

  function fillTable() {
    if (!shown) return;
    const { rows, columns, cells } = shown;
    if (tableCells?.length !== cells.length || table.dataset.shape !== `${rows}x${columns}`) {
      table.dataset.shape = `${rows}x${columns}`;
      const head = element("tr", {}, element("th", { scope: "col" }, spec.row_name),
        ...range(columns).map((c) => element("th", { scope: "col" }, `${c ? "" : `${spec.column_name} `}${name("column", c)}`)));
      const body = range(rows).map((r) => element("tr", {}, element("th", { scope: "row" }, name("row", r)),
        ...range(columns).map(() => element("td"))));
      table.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
      tableCells = [...table.querySelectorAll("td")];
    }
    tableCells.forEach((td, at) => {
      const word = shortWord(cells[at]);
      if (td.textContent === word) return;
      td.textContent = word;
      td.className = cells[at] === 0 || cells[at] === NO_DATA ? "trw-quiet" : "";
    });
  }

  function showView() {
    const hadFocus = root.contains(root.getRootNode().activeElement);
    picture.hidden = isTable();
    table.hidden = !isTable();
    tableButton.setAttribute("aria-pressed", String(isTable()));
    if (hadFocus) (isTable() ? table : canvas).focus({ preventScroll: true });
    queued = true;
    draw();
  }

  function swapView() {
    keep(model, { view: isTable() ? "map" : "table" });
    showView();
    spoken.textContent = isTable() ? "Table" : "Map";
  }

  // ---- the reader

  function cursor() {
    const [r, c] = [model.get("row"), model.get("column")];
    return shown && r >= 0 && c >= 0 && r < shown.rows && c < shown.columns ? [r, c] : null;
  }

  function moveTo(cell) {
    keep(model, cell ? { row: cell[0], column: cell[1] } : { row: -1, column: -1 });
    hover = null;
    queue();
    if (!shown) return;
    write();
    spoken.textContent = cell ? cellLine(cell) : "";
  }

  function showHelp(wanted = help.hidden) {
    help.hidden = !wanted;
    helpButton.setAttribute("aria-expanded", String(wanted));
  }

  function onKey(event) {
    if (event.altKey || event.metaKey) return;
    const target = event.composedPath()[0];
    if (event.key === "?") showHelp();
    else if (event.key === "t" && !event.ctrlKey) swapView();
    else if (event.key === "Escape" && !help.hidden) showHelp(false);
    else if (event.key === "Escape" && cursor()) moveTo(null);
    else if (target === canvas && shown && moved(event)) moveTo(moved(event));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function moved(event) {
    const [rows, columns] = [shown.rows - 1, shown.columns - 1];
    const [r, c] = cursor() ?? [0, 0];
    if (!cursor() && event.key.startsWith("Arrow")) return [0, 0];
    const to = {
      ArrowUp: [r - 1, c], ArrowDown: [r + 1, c], ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1],
      Home: event.ctrlKey ? [0, 0] : [r, 0], End: event.ctrlKey ? [rows, columns] : [r, columns],
    }[event.key];
    return to && [limited(to[0], 0, rows), limited(to[1], 0, columns)];
  }

  function cellAt(event) {
    if (!shown || !layout) return null;
    const box = canvas.getBoundingClientRect();
    const c = Math.floor(((event.clientX - box.left - layout.left) / layout.width) * shown.columns);
    const r = Math.floor(((event.clientY - box.top) / layout.height) * shown.rows);
    return r >= 0 && c >= 0 && r < shown.rows && c < shown.columns ? [r, c] : null;
  }

  const style = (role) => getComputedStyle(root).getPropertyValue(role).trim();

  function readSpec() {
    spec = { row_name: "row", column_name: "column", low: 0, high: 1, idle: "", low_word: null, short_unit: "", ...parsed(model.get("spec")) };
    title.textContent = spec.title ?? "";
    canvas.setAttribute("aria-label",
      `${spec.title ?? "Map"}: ${spec.row_name}s by ${spec.column_name}s. Arrow keys move the cell cursor, t shows a table, ? explains.`);
    help.querySelector("p").textContent = `Each line is one ${spec.row_name}, each column one ${spec.column_name}; `
      + "the stronger the colour of a cell, the higher its number, as the bar above the map shows.";
    tableCells = null;
    writeLegend();
    queue();
  }

  listen.page(root, "keydown", onKey);
  listen.page(canvas, "pointermove", (event) => { hover = cellAt(event); write(); queue(); });
  listen.page(canvas, "pointerleave", () => { hover = null; write(); queue(); });
  listen.page(canvas, "click", (event) => moveTo(cellAt(event)));
  listen.page(window, "resize", queue);
  listen.page(document, "visibilitychange", () => {
    if (document.hidden && queued) setTimeout(draw, 0);
  });
  listen.observer(new ResizeObserver(queue)).observe(picture);
  listen.model(["frame"], takeFrame);
  listen.model(["spec"], readSpec);
  listen.model(["row", "column"], queue);
  listen.model(["view"], showView);
  readSpec();
  takeFrame();
  // Only now is the widget where its background can be seen.
  const look = followTheme(model, root, listen, () => {
    colours = PALETTES[root.dataset.theme].map(rgb);
    hatch = null;
    queue();
  });
  requestAnimationFrame(look);
  showView();

  return () => {
    listen.stop();
    root.remove();
  };
}

function frameOf(data) {
  if (data.byteLength < HEAD_BYTES || data.getUint32(0, true) !== MAGIC) return null;
  const [rows, columns] = [data.getUint16(16, true), data.getUint16(18, true)];
  if (data.byteLength !== HEAD_BYTES + rows * columns) return null;
  return {
    seq: data.getUint32(4, true), time: data.getFloat64(8, true), rows, columns,
    low: data.getFloat32(20, true), high: data.getFloat32(24, true),
    cells: new Uint8Array(data.buffer, data.byteOffset + HEAD_BYTES, rows * columns),
  };
}

function hatching(pen, ground, line) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.fillStyle = ground;
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = line;
  brush.lineWidth = 1.5;
  for (const x of [-8, 0, 8]) {
    brush.beginPath();
    brush.moveTo(x, 8);
    brush.lineTo(x + 8, 0);
    brush.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const range = (count) => Array.from({ length: count }, (_, n) => n);

export default { render };
