// The due load of the coming time: from a minute by seconds to a year by days.

import { between, broker } from '../broker.js';
import { get } from '../api.js';
import { BarChart, BarList, ticks } from '../charts.js';
import { addOptions, field, select } from '../dialogs.js';
import { button, el, emptiness, keyed, section, set, show, write } from '../dom.js';
import { clock, count, instant, rate, share, span } from '../format.js';
import { Loading } from '../loading.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { Tile, tiles } from '../tiles.js';

const SIZES = { second: 1_000, minute: 60_000, hour: 3_600_000, day: 86_400_000 };
const UNITS = Object.keys(SIZES);
// The name of a view, its unit, and its number of units.
const VIEWS = [['Minute', 'second', 60], ['Hour', 'minute', 60], ['Day', 'hour', 24], ['Month', 'day', 31], ['Year', 'day', 365]];
const EVERY_MS = { second: 2_000, minute: 5_000, hour: 10_000, day: 20_000 };
const FAR = 4; // a rate above this multiple of the highest bar is written and not drawn
const PEAKS = 5;
const TOPICS = 12;
const DAY_AND_MONTH = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short' });
// The broker counts days in UTC.
const UTC_DAY = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', timeZone: 'UTC' });
const UTC_WEEKDAY = new Intl.DateTimeFormat('en-GB', { timeZone: 'UTC', weekday: 'short', day: 'numeric', month: 'short', year: 'numeric' });

const SEND = `curl -s ${location.origin}/v1/topics/reminders/messages \\
  -H 'content-type: application/json' -d '{"body": "hello", "after": "30m"}'`;

/** Return the window and the topic that the address names. `fromMs` is null for a window that begins at the present. */
function windowOf(parameters) {
  const by = UNITS.includes(parameters.get('by')) ? parameters.get('by') : 'minute';
  const n = Math.min(400, Math.max(2, Number(parameters.get('n')) || 60));
  const from = Number(parameters.get('from'));
  return { by, n, fromMs: from > 0 ? from : null, topic: parameters.get('topic') ?? '' };
}

export const coming = {
  id: 'coming',
  title: 'Coming',
  open: (root, parameters) => new Coming(root, parameters),
};

class Coming {
  constructor(root, parameters) {
    this.buckets = [];
    this.chart = new BarChart('Messages by when they are due. Arrow keys point at a bar, Enter zooms in.',
      { onPoint: at => this.point(at), onChoose: at => this.zoomIn(at) });
    this.due = new Tile('Due in this window');
    this.peak = new Tile('Busiest');
    this.speed = new Tile('Consumers take');
    this.readout = el('p', { class: 'readout', 'aria-live': 'polite' });
    this.views = el('div', { class: 'group', role: 'group', 'aria-label': 'How far ahead' },
      ...VIEWS.map(([name, by, n]) => button(name, () => this.go({ by, n, fromMs: null }), '', { 'data-view': `${by}-${n}` })));
    this.earlier = button('‹ Earlier', () => this.shift(-1));
    this.later = button('Later ›', () => this.shift(1));
    this.out = button('Zoom out', () => this.zoomOut());
    this.topics = select([['', 'All topics']], '', { id: 'coming-topic', onchange: () => this.go({ topic: this.topics.value }) });
    this.ofTopics = new BarList('Messages due in this window, by topic');
    this.peaks = el('ol', { class: 'peaks' });
    this.level = el('li', { class: 'level' });
    this.nothing = emptiness('Nothing is due in this window.', 'Look further ahead, or schedule a message:', SEND);
    this.refused = refusal();
    this.chartTitle = el('h2');
    this.content = el('div', { class: 'stack' },
      el('section', { class: 'card' }, this.chartTitle, el('ul', { class: 'legend' }, el('li', {}, 'due'), this.level), this.chart.node, this.readout),
      el('div', { class: 'columns' }, section('Busiest', this.peaks), section('By topic', this.ofTopics.node)));
    const top = tiles(this.due, this.peak, this.speed);
    this.loading = new Loading(top, this.nothing, this.content);
    root.append(el('div', { class: 'toolbar' }, this.views, el('div', { class: 'group' }, this.earlier, this.later), this.out, field('Topic', this.topics)),
      top, this.refused.node, this.loading.node, this.nothing, this.content);
    this.onBroker = () => this.drawSpeed();
    broker.addEventListener('change', this.onBroker);
    this.follow(parameters);
  }

  close() {
    this.poll.stop();
    this.chart.close();
    broker.removeEventListener('change', this.onBroker);
  }

  /** Show the window that the address names. Also called when the user goes back in the history. */
  follow(parameters) {
    this.window = windowOf(parameters);
    const { by, n, fromMs, topic } = this.window;
    for (const each of this.views.childNodes) {
      set(each, 'aria-pressed', each.dataset.view === `${by}-${n}` && fromMs === null ? 'true' : 'false');
    }
    if (topic) addOptions(this.topics, [topic]);
    this.topics.value = topic;
    this.out.disabled = by === 'day' && n >= 365;
    this.chart.point(-1);
    this.poll?.stop();
    // After an empty window, the next one is loading. A chart stays until the next answer, and so does its focus.
    if (!this.nothing.hidden) this.loading.begin();
    this.poll = new Poll({ everyMs: EVERY_MS[by], read: signal => this.read(signal), show: found => this.show(found),
      fail: error => this.refused.show(error), loading: this.loading }).start();
  }

  /** Open the address of the window with changed fields. */
  go(change) {
    const { by, n, fromMs, topic } = { ...this.window, ...change };
    const parameters = new URLSearchParams({ by, n, ...(fromMs ? { from: fromMs } : {}), ...(topic ? { topic } : {}) });
    location.hash = `#/coming?${parameters}`;
  }

  read(signal) {
    const { by, n, fromMs, topic } = this.window;
    const size = SIZES[by];
    const beginMs = fromMs ?? Math.floor(broker.nowMs() / size) * size;
    return get(['v1', 'forecast'], { by, from: new Date(beginMs).toISOString(), to: new Date(beginMs + n * size).toISOString(), topic }, signal);
  }

  show(found) {
    this.refused.show(null);
    const size = SIZES[found.by];
    this.size = size;
    this.fromMs = found.from_ms;
    const n = Math.max(1, Math.round((found.to_ms - found.from_ms) / size));
    this.buckets = new Array(n).fill(0);
    let recurring = 0;
    for (const { from_ms: ms, due, recurring: more = 0 } of found.buckets) {
      const at = Math.floor((ms - found.from_ms) / size);
      if (at >= 0 && at < n) this.buckets[at] += due + more;
      recurring += more;
    }
    const sum = this.buckets.reduce((a, b) => a + b, 0);
    show(this.nothing, sum === 0);
    show(this.content, sum > 0);
    write(this.chartTitle, `Due by the ${found.by}, ${instant(found.from_ms)} to ${instant(found.to_ms)}`);
    const until = found.recurring_to_ms === undefined ? '' : `, counted until ${instant(found.recurring_to_ms)}`;
    this.due.show(count(sum), `${span(found.to_ms - found.from_ms)} from ${instant(found.from_ms)}`
      + (recurring || until ? `; ${count(recurring)} by schedules${until}` : ''));
    this.showPeaks(found.by, sum);
    this.showTopics(found.topics ?? {}, found.recurring ?? {});
    this.draw();
    this.drawSpeed();
  }

  /** Show the highest bars. */
  showPeaks(by, sum) {
    const peaks = this.buckets.map((due, at) => ({ due, at })).filter(({ due }) => due > 0)
      .sort((a, b) => b.due - a.due || a.at - b.at).slice(0, PEAKS);
    const [first] = peaks;
    this.peak.show(first ? count(first.due) : '–', first ? `in the ${by} of ${this.labelOf(first.at)}; ${rate(first.due / (this.size / 1_000))} a second` : '');
    keyed(this.peaks, peaks, ({ at }) => this.fromMs + at * this.size, () => {
      const link = button('', () => this.zoomIn(link.at), 'link');
      return el('li', {}, link, el('span'));
    }, (item, { due, at }) => {
      item.firstChild.at = at;
      item.firstChild.disabled = by === 'second';
      write(item.firstChild, this.labelOf(at));
      write(item.lastChild, `  ${count(due)}, ${share(due / sum)}`);
    });
  }

  showTopics(topics, recurring) {
    const names = Object.keys({ ...topics, ...recurring });
    const rows = names.map(label => ({ label, n: (topics[label] ?? 0) + (recurring[label] ?? 0) })).sort((a, b) => b.n - a.n || (a.label < b.label ? -1 : 1));
    addOptions(this.topics, rows.map(({ label }) => label));
    this.ofTopics.show(rows.slice(0, TOPICS), row => count(row.n));
  }

  /** Draw a line at the number of messages that consumers take in the time of a bar, by the rate of the last minute. */
  drawSpeed() {
    const perSecond = deliveredPerSecond();
    this.speed.show(perSecond === null ? '–' : rate(perSecond), perSecond === null ? 'not known yet' : 'a second, in the last minute');
    const level = perSecond === null || !this.size ? null : perSecond * (this.size / 1_000);
    show(this.level, level !== null && level > 0);
    // The broker counts deliveries of all topics together.
    const whose = this.window.topic ? ', of all topics' : '';
    const far = level > this.highest * FAR ? `: ${rate(level)} a ${this.window.by}, far above this chart` : '';
    write(this.level, `what consumers take now${whose}${far}`);
    if (level !== this.levelDrawn && this.buckets.length) {
      this.levelDrawn = level;
      this.draw();
    }
  }

  get highest() {
    return Math.max(1, ...this.buckets);
  }

  draw() {
    const { highest } = this;
    const level = this.levelDrawn > 0 && this.levelDrawn <= highest * FAR ? this.levelDrawn : null;
    const marks = ticks(Math.max(highest, level ?? 0));
    this.chart.show({ values: this.buckets, top: marks.at(-1), level, ys: marks.map(n => [n / marks.at(-1), short(n)]),
      xs: this.labels() });
  }

  labels() {
    const n = this.buckets.length;
    const most = Math.max(2, Math.min(6, Math.floor(this.chart.width / 110)));
    return Array.from({ length: most }, (_, i) => Math.round((i * n) / most)).map(at => [at / n, this.labelOf(at, true)]);
  }

  labelOf(at, isShort = false) {
    const ms = this.fromMs + at * this.size;
    const when = new Date(ms);
    if (this.size === SIZES.day) return isShort ? UTC_DAY.format(when) : `${UTC_WEEKDAY.format(when)} (UTC)`;
    const time = this.size === SIZES.second ? clock(ms) : clock(ms).slice(0, 5);
    const isFar = this.buckets.length * this.size > SIZES.day;
    return isShort && !isFar ? time : isShort ? `${DAY_AND_MONTH.format(when)} ${time}` : `${time}, ${DAY_AND_MONTH.format(when)}`;
  }

  point(at) {
    const finer = this.size && this.size > SIZES.second ? ' Press Enter or click to zoom in.' : '';
    write(this.readout, at < 0 ? 'Point at a bar, or use the arrow keys.' : `${this.labelOf(at)}: ${count(this.buckets[at])} due.${finer}`);
  }

  zoomIn(at) {
    const finer = UNITS[UNITS.indexOf(this.window.by) - 1];
    if (!finer) return;
    this.go({ by: finer, n: Math.round(this.size / SIZES[finer]), fromMs: this.fromMs + at * this.size });
  }

  zoomOut() {
    const { by, n, fromMs } = this.window;
    const viewNow = VIEWS.findIndex(([, unit, most]) => unit === by && most >= n);
    const [, unit, most] = VIEWS[Math.min(VIEWS.length - 1, viewNow < 0 ? VIEWS.length - 1 : viewNow + 1)];
    // The larger window begins at a multiple of its length, and contains the smaller one.
    const beginMs = fromMs === null ? null : Math.floor(fromMs / (SIZES[unit] * most)) * SIZES[unit] * most;
    const isPast = beginMs !== null && beginMs < broker.nowMs();
    this.go({ by: unit, n: most, fromMs: isPast ? null : beginMs });
  }

  shift(by) {
    const { n } = this.window;
    const toMs = this.fromMs + by * n * this.size;
    // A window that reaches the present has no fixed begin.
    this.go({ fromMs: toMs <= broker.nowMs() ? null : toMs });
  }
}

/** Return the deliveries per second of the last minute, null while they are not known. */
function deliveredPerSecond() {
  const newest = broker.history.at(-1);
  const oldest = broker.history.find(sample => newest && sample.atMs >= newest.atMs - 60_000);
  if (!oldest || oldest === newest || newest.delivered === undefined) return null;
  return between(oldest, newest).deliveredPerSecond;
}

const short = n => (n >= 1_000_000 ? `${n / 1_000_000} M` : n >= 10_000 ? `${n / 1_000} k` : count(n));
