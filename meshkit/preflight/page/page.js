"use strict";
// A rank is chosen by a click; pointing at a rank or an axis lights groups up until the pointer leaves.
document.documentElement.dataset.errors = "0";
addEventListener("error", () => { document.documentElement.dataset.errors = +document.documentElement.dataset.errors + 1; });

const data = JSON.parse(document.getElementById("data").textContent);
const cells = [...document.querySelectorAll(".rank")];
const bars = [...document.querySelectorAll(".memory")];
const groupOf = {}; // axis -> rank -> its group
for (const [axis, { groups }] of Object.entries(data.axes)) {
  groupOf[axis] = [];
  for (const group of groups) for (const rank of group) groupOf[axis][rank] = group;
}
let chosen = 0;

function light(cell, axes, colours) {
  cell.dataset.lit = axes.join(" ");
  const step = 100 / Math.max(colours.length, 1);
  const stripes = colours.map((colour, at) => `${colour} ${at * step}% ${(at + 1) * step}%`);
  cell.style.setProperty("--lit", colours.length ? `linear-gradient(90deg, ${stripes.join(", ")})` : "none");
  cell.style.setProperty("--tint", colours.length ? colours[0] : "transparent");
}

// Each rank that shares a group with this one gets the colours of the axes on which it does.
function lightRank(rank) {
  for (const cell of cells) {
    const axes = Object.keys(data.axes).filter((axis) => groupOf[axis][rank].includes(+cell.dataset.rank));
    light(cell, axes, axes.map((axis) => data.axes[axis].colour));
    cell.classList.toggle("far", axes.length === 0);
  }
}

// All groups of one axis, each in a hue of its own.
function lightAxis(axis) {
  const groups = data.axes[axis].groups;
  for (const cell of cells) {
    const at = groups.indexOf(groupOf[axis][+cell.dataset.rank]);
    light(cell, [axis], [`hsl(${Math.round((at * 360 * 0.381966) % 360 + 210)} 65% 52%)`]);
    cell.classList.remove("far");
  }
}

function choose(rank) {
  chosen = rank;
  for (const cell of cells) cell.setAttribute("aria-pressed", +cell.dataset.rank === rank);
  const own = bars.find((row) => +row.dataset.rank === rank)
    ?? bars.find((row) => data.alike[+row.dataset.rank] === data.alike[rank]);
  for (const row of bars) row.classList.toggle("now", row === own);
  for (const part of document.querySelectorAll(".alike")) part.hidden = +part.dataset.alike !== data.alike[rank];
  for (const name of document.querySelectorAll(".chosen")) name.textContent = rank;
  for (const row of document.querySelectorAll(".axis")) {
    row.querySelector(".group").textContent = groupOf[row.dataset.axis][rank].join(" ");
  }
  lightRank(rank);
}

for (const cell of cells) {
  const rank = +cell.dataset.rank;
  cell.addEventListener("click", () => choose(rank));
  cell.addEventListener("mouseenter", () => lightRank(rank));
  cell.addEventListener("mouseleave", () => lightRank(chosen));
}
for (const row of document.querySelectorAll(".axis")) {
  row.addEventListener("mouseenter", () => lightAxis(row.dataset.axis));
  row.addEventListener("mouseleave", () => lightRank(chosen));
}
for (const row of bars) row.addEventListener("click", () => choose(+row.dataset.rank));
choose(0);
