// The lateness of scheduled messages, in the last minute and since the start, and the rate of releases.

import { BOUNDS, between, broker, bucketsOf, follow, lately, quantile, waiting } from '../broker.js';
import { BarList, LineChart, ticks } from '../charts.js';
import { el, emptiness, section, show } from '../dom.js';
import { count, rate, share, span } from '../format.js';
import { Loading } from '../loading.js';
import { refusal } from '../refusal.js';
import { Tile, tiles } from '../tiles.js';

const NOW_MS = 60_000;
const SHOWN_MS = 10 * 60_000;
const GAP_MS = 10_000; // between samples: the tab was hidden, or the broker did not answer
const LATE_MS = 100; // a p99 above this is shown as a warning
const VERY_LATE_MS = 1_000;
const SHOWN_BOUNDS = [1, 10, 100, 1_000, 10_000];

const SEND = `curl -s ${location.origin}/v1/topics/reminders/messages \\
  -H 'content-type: application/json' -d '{"body": "hello", "after": "10s"}'`;

const bound = at => (at < 0 ? '–' : BOUNDS[at] === Infinity ? '> 1 min' : at === 0 ? '0 ms' : `≤ ${span(BOUNDS[at])}`);
// The bound of a bucket may be far above the releases in it. A bound above the maximum would look like an error, so the
// maximum is shown instead.
const within = (at, mostMs) => (at > 0 && BOUNDS[at] !== Infinity && BOUNDS[at] > mostMs ? `≤ ${span(mostMs)}` : bound(at));
const tone = at => (at < 0 ? '' : BOUNDS[at] <= LATE_MS ? 'good' : BOUNDS[at] <= VERY_LATE_MS ? 'warn' : 'bad');

export const punctual = {
  id: 'punctual',
  title: 'Punctual',
  open(root) {
    const now = new Tile('Late by, last minute');
    const ever = new Tile('Late by, since the start');
    const speed = new Tile('Released per second');
    const kept = new Tile('Waiting');
    const late = new LineChart('How late, over the last ten minutes');
    const released = new LineChart('Released per second, over the last ten minutes', 140);
    const histogram = new BarList('Releases since the start, by how late they were');
    const nothing = emptiness('Nothing has been released since the broker started.',
      'Schedule a message, and see here how punctual it is:', SEND);
    const figures = el('div', { class: 'stack' },
      section('How late, the last ten minutes', el('ul', { class: 'legend' },
        el('li', { class: 'p50' }, 'half of the messages'), el('li', { class: 'p99' }, '99 of 100')), late.node),
      el('div', { class: 'columns' },
        section('Released per second', released.node),
        section('By lateness, since the start', histogram.node)));
    const top = tiles(now, ever, speed, kept);
    const [refused, loading] = [refusal(), new Loading(top, nothing, figures)];
    root.append(refused.node, loading.node, top, nothing, figures);

    function draw() {
      const { status } = broker;
      const latestMs = status.lateness.max_ms;
      const counts = bucketsOf(status.lateness);
      const last = lately(NOW_MS);
      const isQuiet = !last || last.released === 0;
      const p99 = isQuiet ? -1 : quantile(last.counts, 0.99);
      now.show(within(p99, latestMs), isQuiet ? 'nothing was due' : `99 of 100; half ${within(quantile(last.counts, 0.5), latestMs)}`, tone(p99));
      ever.show(within(quantile(counts, 0.99), latestMs), status.lateness.released
        ? `99 of 100; half ${within(quantile(counts, 0.5), latestMs)}; the latest ${span(latestMs)}` : 'nothing was due yet');
      speed.show(last ? rate(last.perSecond) : '–', `${count(status.lateness.released)} since the start`);
      kept.show(count(waiting(status)), `${count(status.schedule.near_rows)} of them near their instant`);
      show(nothing, status.lateness.released === 0);
      show(figures, status.lateness.released > 0);
      histogram.show(histogramOf(counts, latestMs), row => `${share(row.n / status.lateness.released)}  ${count(row.n)}`);
      drawTimes(late, released);
    }

    const leave = follow(loading, refused, draw);
    return {
      close() {
        leave();
        late.close();
        released.close();
      },
    };
  },
};

/** Return the buckets from the first to the last with a release, also empty buckets between them. */
function histogramOf(counts, latestMs) {
  const used = counts.flatMap((n, at) => (n > 0 ? [at] : []));
  return counts.slice(0, (used.at(-1) ?? -1) + 1).map((n, at) => ({ label: within(at, latestMs), n })).slice(used[0] ?? 0);
}

/** Draw the charts of the last ten minutes, with gaps where samples are missing. */
function drawTimes(late, released) {
  const samples = broker.history;
  const endMs = samples.at(-1).atMs;
  const across = ms => 1 - (endMs - ms) / SHOWN_MS;
  const steps = samples.slice(1).map((sample, at) => between(samples[at], sample));
  // The chart reaches at least 200 ms, so that one millisecond does not fill it.
  const highest = Math.max(BOUNDS.indexOf(200), ...steps.map(step => quantile(step.counts, 0.99) + 1));
  const [half, most, speeds] = [[], [], []];
  for (let at = 1; at < samples.length; at += 1) {
    const step = steps[at - 1];
    const isGap = samples[at].atMs - samples[at - 1].atMs > GAP_MS;
    const up = part => (isGap || step.released === 0 ? null : quantile(step.counts, part) / highest);
    const [from, to] = [across(samples[at - 1].atMs), across(samples[at].atMs)];
    half.push([from, up(0.5)], [to, up(0.5)]);
    most.push([from, up(0.99)], [to, up(0.99)]);
    speeds.push([from, isGap ? null : step.perSecond], [to, isGap ? null : step.perSecond]);
  }
  const xs = [[0, '10 min ago'], [0.5, '5 min ago'], [1, 'now']];
  const ys = SHOWN_BOUNDS.map(ms => [BOUNDS.indexOf(ms) / highest, span(ms)]).filter(([part]) => part <= 1);
  late.show({ ys: [[0, '0'], ...ys.slice(highest > 10 ? 1 : 0)], xs, lines: [
    { name: 'p99', points: most, isStepped: true }, { name: 'p50', points: half, isStepped: true }] });
  const marks = ticks(Math.max(1, ...speeds.map(([, n]) => n ?? 0)));
  released.show({ xs, ys: marks.map(n => [n / marks.at(-1), rate(n)]), lines: [
    { name: 'speed', points: speeds.map(([x, n]) => [x, n === null ? null : n / marks.at(-1)]), isFilled: true }] });
}
