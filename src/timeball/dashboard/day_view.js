// A day in a time zone: the number of messages due in each minute, and the times of each recurring schedule.
//
// The begin of the day and its changes of the clock come from the broker, by a preview of a rule for each quarter of an
// hour. So the time zone rules are those of the broker, not those of the browser.

import { ask, get } from './api.js';
import { broker } from './broker.js';
import { BarChart, ticks } from './charts.js';
import { field } from './dialogs.js';
import { el, keyed, section, set, show, svg, write } from './dom.js';
import { count, printable, zone } from './format.js';
import { Poll } from './poll.js';
import { ruleText, zones } from './schedule_form.js';

const EVERY_MS = 10_000;
const MINUTE_MS = 60_000;
const HOUR_MS = 3_600_000;
const QUARTERS = 220; // 55 hours, from 15 hours before the day in UTC: they contain the day of any zone, also of 25 hours
const TIMES_MAX = 1_000; // the most times that the broker returns in a preview
const SPOKEN = 12; // times of a schedule that a screen reader reads aloud
const PEAKS = 5;
const WIDTH = 1_440; // of a lane, in units of its picture

const wall = local => Date.parse(`${local}Z`); // milliseconds of a local time, as if in UTC: for differences only
// The hours and minutes of a local time, and its seconds unless they are 0.
const hm = local => local.slice(11, local.endsWith(':00') ? 16 : 19);

/**
 * Return a day of a zone: its begin and end, its quarters of an hour, and the changes of its clocks.
 *
 * Returns null if the zone does not have this day. Raises Problem for a wrong zone.
 */
async function readDay(date, name, signal) {
  const from = Date.parse(`${date}T00:00:00Z`) - 15 * HOUR_MS;
  const { times } = await ask('POST', ['v1', 'preview'], { body: { rule: { cron: '*/15 * * * *', zone: name }, from, count: QUARTERS }, signal });
  const first = times.findIndex(({ local }) => local.startsWith(date));
  const last = times.findLastIndex(({ local }) => local.startsWith(date));
  if (first < 0) return null;
  const quarters = times.slice(first, last + 2);
  const changes = [];
  // The quarter before the day is compared too, because clocks may change at its begin.
  for (let at = Math.max(1, first); at < Math.min(last + 2, times.length); at += 1) {
    const [before, { due_ms: dueMs, local }] = [times[at - 1], times[at]];
    const expectedMs = wall(before.local) + dueMs - before.due_ms; // the local time without a change
    const jumpMs = wall(local) - expectedMs;
    if (jumpMs !== 0) changes.push({ atMs: dueMs, jumpMs, from: new Date(expectedMs).toISOString().slice(0, 19), to: local });
  }
  return { zone: name, startMs: quarters[0].due_ms, endMs: quarters.at(-1).due_ms, quarters: quarters.slice(0, -1), changes };
}

/** Return the local time of an instant of the day. */
function localOf(day, ms) {
  const quarter = day.quarters.findLast(each => each.due_ms <= ms) ?? day.quarters[0];
  return new Date(wall(quarter.local) + ms - quarter.due_ms).toISOString().slice(0, 19);
}

function changeText({ from, to, jumpMs }) {
  return jumpMs > 0 ? `Clocks go forward from ${hm(from)} to ${hm(to)}: the times between do not exist.`
    : `Clocks go back from ${hm(from)} to ${hm(to)}: the times between come twice.`;
}

export class DayView {
  constructor() {
    this.rows = [];
    this.timesOfRules = new Map(); // the times of each rule on the shown day, by the JSON of the rule
    this.date = el('input', { type: 'date', id: 'day', required: true, onchange: () => this.ask() });
    this.zone = el('input', { id: 'day-zone', list: 'day-zones', value: zone(), spellcheck: 'false', autocomplete: 'off', 'aria-describedby': 'day-error', onchange: () => this.ask() });
    this.date.value = new Date(broker.nowMs() - new Date().getTimezoneOffset() * MINUTE_MS).toISOString().slice(0, 10);
    this.error = el('p', { class: 'field-error', id: 'day-error', role: 'status', hidden: true });
    this.changes = el('ul', { class: 'changes' });
    this.chart = new BarChart('Messages due in each minute of the day. Arrow keys point at a minute, Enter shows its seconds.',
      { height: 160, onPoint: at => this.point(at), onChoose: at => this.open(at) });
    this.readout = el('p', { class: 'readout', 'aria-live': 'polite' });
    this.summary = el('p', { class: 'hint' });
    this.peaks = el('ol', { class: 'peaks' });
    this.lanes = el('tbody');
    this.table = el('table', { class: 'lanes' }, el('caption', { class: 'unseen' }, 'Times of the schedules of this page'),
      el('thead', { class: 'unseen' }, el('tr', {}, el('th', { scope: 'col' }, 'Schedule'), el('th', { scope: 'col' }, 'Times'), el('th', { scope: 'col' }, 'Number'))), this.lanes);
    this.content = el('div', { class: 'stack', hidden: true }, this.changes, el('div', { class: 'table-frame' }, this.table),
      this.summary, this.chart.node, this.readout, this.peaks);
    const list = zones();
    list.id = 'day-zones';
    this.node = section('A day', el('div', { class: 'toolbar' }, field('Day', this.date), field('Time zone', this.zone), list), this.error, this.content);
    this.poll = new Poll({ everyMs: EVERY_MS, read: signal => this.read(signal), show: found => this.show(found), fail: problem => this.fail(problem.message) });
  }

  close() {
    this.poll.stop();
    this.chart.close();
  }

  /** Show the times of these schedules. Asks the broker only if a name, a state or a rule has changed. */
  showRows(rows) {
    const before = JSON.stringify(this.rows.map(row => [row.name, row.state, row.rule]));
    this.rows = rows;
    if (this.poll.isStopped) this.poll.start();
    else if (JSON.stringify(rows.map(row => [row.name, row.state, row.rule])) !== before) this.poll.now();
  }

  /** Ask for another day or zone. */
  ask() {
    this.timesOfRules.clear();
    this.poll.now();
  }

  /** Return the day, its due load and the times of each schedule, or { problem } with a text. Raises Problem. */
  async read(signal) {
    const name = this.zone.value.trim();
    if (!this.date.value) return { problem: 'Choose a day.' };
    const key = `${this.date.value} ${name}`;
    if (this.day?.key !== key) {
      const day = await readDay(this.date.value, name, signal);
      if (!day) return { problem: `${name} has no ${this.date.value}.` };
      this.day = { key, ...day };
    }
    const { day, rows } = this;
    const [from, to] = [day.startMs, day.endMs].map(ms => new Date(ms).toISOString());
    const [counted, ...times] = await Promise.all([get(['v1', 'forecast'], { by: 'minute', from, to }, signal), ...rows.map(row => this.timesOf(row, day, signal))]);
    return { day, counted, lanes: rows.map((row, at) => ({ row, times: times[at] })) };
  }

  /** Return the times of a schedule on a day, which are read once. Null for a schedule that is paused or failed. */
  async timesOf({ rule, state }, day, signal) {
    if (state !== 'active') return null;
    const key = JSON.stringify(rule);
    let times = this.timesOfRules.get(key);
    if (!times) {
      times = (await ask('POST', ['v1', 'preview'], { body: { rule, from: day.startMs - 1, count: TIMES_MAX }, signal })).times
        .map(time => time.due_ms).filter(ms => ms < day.endMs);
      this.timesOfRules.set(key, times);
    }
    return times;
  }

  show({ problem, day, counted, lanes }) {
    if (problem) {
      this.fail(problem);
      return;
    }
    show(this.error, false);
    set(this.zone, 'aria-invalid', false);
    show(this.content, true);
    show(this.changes, day.changes.length > 0);
    keyed(this.changes, day.changes, change => change.atMs, change => el('li', { class: 'state warn' }, changeText(change)));
    this.showMinutes(day, counted);
    keyed(this.lanes, lanes, ({ row }) => row.name, makeLane, (node, lane) => showLane(node, lane, day));
  }

  fail(text) {
    write(this.error, text);
    show(this.error, true);
    set(this.zone, 'aria-invalid', /time zone/.test(text) && 'true');
    show(this.content, false);
  }

  /** Show the number of messages due in each minute, those of schedules included that are not stored yet. */
  showMinutes(day, { buckets, recurring_to_ms: toMs }) {
    this.minutes = new Array(Math.round((day.endMs - day.startMs) / MINUTE_MS)).fill(0);
    let recurring = 0;
    for (const { from_ms: ms, due, recurring: more = 0 } of buckets) {
      const at = Math.floor((ms - day.startMs) / MINUTE_MS);
      if (at >= 0 && at < this.minutes.length) this.minutes[at] += due + more;
      recurring += more;
    }
    const all = this.minutes.reduce((a, b) => a + b, 0);
    const end = toMs === undefined ? '' : ` Schedules are counted until ${hm(localOf(day, toMs))}.`;
    write(this.summary, `${count(all)} messages due by the minute, ${count(recurring)} of them by schedules and not stored yet.${end}`);
    const marks = ticks(Math.max(1, ...this.minutes));
    const hours = day.quarters.filter(({ local }) => local.endsWith(':00:00') && Number(local.slice(11, 13)) % 3 === 0);
    const length = day.endMs - day.startMs;
    this.chart.show({ values: this.minutes, top: marks.at(-1), level: null, ys: marks.map(n => [n / marks.at(-1), count(n)]),
      xs: hours.map(({ due_ms: ms, local }) => [(ms - day.startMs) / length, hm(local)]) });
    const peaks = this.minutes.map((n, at) => ({ n, at })).filter(({ n }) => n > 0).sort((a, b) => b.n - a.n || a.at - b.at).slice(0, PEAKS);
    keyed(this.peaks, peaks, ({ at }) => at, () => el('li'), (node, { n, at }) => write(node, `${this.labelOf(at)}: ${count(n)}`));
  }

  labelOf(at) {
    return hm(localOf(this.day, this.day.startMs + at * MINUTE_MS));
  }

  point(at) {
    write(this.readout, at < 0 ? 'Point at a minute, or use the arrow keys.' : `${this.labelOf(at)}: ${count(this.minutes[at])} due. Press Enter or click to see its seconds.`);
  }

  open(at) {
    location.hash = `#/coming?${new URLSearchParams({ by: 'second', n: 60, from: this.day.startMs + at * MINUTE_MS })}`;
  }
}

function makeLane({ row }) {
  const picture = svg('svg', { class: 'lane', role: 'img', viewBox: `0 0 ${WIDTH} 20`, preserveAspectRatio: 'none' },
    svg('path', { class: 'hours' }), svg('path', { class: 'changed' }), svg('path', { class: 'runs' }));
  return el('tr', {}, el('th', { scope: 'row' }, el('bdi', { class: 'text mono' }, printable(row.name, 60))), el('td', {}, picture), el('td', { class: 'number' }));
}

function showLane(node, { row, times }, day) {
  const x = ms => ((WIDTH * (ms - day.startMs)) / (day.endMs - day.startMs)).toFixed(1);
  const bar = ms => `M${x(ms)} 0V20`;
  const [hours, changed, runs] = node.cells[1].firstChild.children;
  set(hours, 'd', day.quarters.filter(({ local }) => local.endsWith(':00:00')).map(({ due_ms: ms }) => bar(ms)).join('') || 'M0 0');
  // A skipped time is a narrow mark. A repeated time is marked both times that it passes.
  set(changed, 'd', day.changes.map(({ atMs, jumpMs }) => (jumpMs > 0 ? `M${x(atMs - 120_000)} 0H${x(atMs + 120_000)}V20H${x(atMs - 120_000)}Z`
    : `M${x(atMs + jumpMs)} 0H${x(atMs - jumpMs)}V20H${x(atMs + jumpMs)}Z`)).join('') || 'M0 0');
  const isDense = times?.length === TIMES_MAX;
  set(runs, 'd', (isDense ? `M${x(times[0])} 0H${x(day.endMs)}V20H${x(times[0])}Z` : (times ?? []).map(bar).join('')) || 'M0 0');
  set(runs, 'data-dense', isDense && 'true');
  write(node.cells[2], times === null ? row.state : isDense ? `${count(TIMES_MAX)} or more` : count(times.length));
  const spoken = (times ?? []).slice(0, SPOKEN).map(ms => hm(localOf(day, ms))).join(', ');
  const rest = (times ?? []).length > SPOKEN ? ' and later' : '';
  set(node.cells[1].firstChild, 'aria-label', times === null ? `${row.state}: no times` : `${printable(ruleText(row.rule), 200)}: ${spoken ? spoken + rest : 'no times on this day'}`);
}
