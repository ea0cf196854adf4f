// Reads GET /v1/broker every two seconds on each page: the status of the broker, and its lateness of the last minutes.

import { get } from './api.js';
import { Poll, reach } from './poll.js';

const EVERY_MS = 2_000;
const HISTORY_MS = 10 * 60_000;
const BUCKET = /^([<>])=?(\d+)ms$/;

/** The last status of the broker, and samples of ten minutes. Its events are `change` and `refused`. */
export const broker = Object.assign(new EventTarget(), {
  status: null,
  history: [], // of samples, the oldest first
  mayAdmin: false,
  problem: null, // the Problem of the last refusal
  aheadMs: 0, // how far the broker's clock is ahead of the clock of this machine
  /** Return the broker's time. */
  nowMs: () => Date.now() + broker.aheadMs,
});

const poll = new Poll({ everyMs: EVERY_MS, read: signal => get(['v1', 'broker'], {}, signal), show: keepStatus,
  fail: problem => {
    broker.problem = problem;
    broker.dispatchEvent(new Event('refused'));
  } });

/**
 * Call `draw` at each status of the broker, and once at the begin if there is one. Until then `loading` and `refused`
 * show why there is none. Returns a function that ends this.
 */
export function follow(loading, refused, draw) {
  const onChange = () => {
    if (!broker.status) return;
    refused.show(null);
    loading.done();
    draw();
  };
  const onRefused = () => {
    loading.refused();
    refused.show(broker.problem);
  };
  const onReach = () => reach.lostMs && loading.lost(reach.reason);
  const listeners = [[broker, 'change', onChange], [broker, 'refused', onRefused], [reach, 'change', onReach]];
  for (const [target, name, listener] of listeners) target.addEventListener(name, listener);
  onChange();
  if (!broker.status && broker.problem) onRefused();
  return () => listeners.forEach(([target, name, listener]) => target.removeEventListener(name, listener));
}

export const watchBroker = () => poll.isStopped && poll.start();
export const leaveBroker = () => {
  poll.stop();
  Object.assign(broker, { status: null, mayAdmin: false, problem: null });
};

/** Store a status and a sample of it. The history begins anew after a restart of the broker. */
function keepStatus(status) {
  const now = Date.now();
  broker.aheadMs = status.now_ms - now;
  const before = broker.status;
  // Another process answers, whose counts begin at 0.
  if (before && (before.pid !== status.pid || status.lateness.released < before.lateness.released)) broker.history = [];
  broker.status = status;
  broker.problem = null;
  broker.mayAdmin = status.may_admin === true;
  broker.history.push({ atMs: now, released: status.lateness.released, counts: bucketsOf(status.lateness),
    delivered: status.delivered });
  while (broker.history[0].atMs < now - HISTORY_MS) broker.history.shift();
  broker.dispatchEvent(new Event('change'));
}

// ---- lateness -----------------------------------------------------------------------------------------------------

export const BOUNDS = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, Infinity];

/** Return the number of releases in each bucket of lateness, in the order of BOUNDS, which are their upper bounds. */
export function bucketsOf(lateness) {
  const counts = new Array(BOUNDS.length).fill(0);
  for (const [name, n] of Object.entries(lateness.buckets ?? {})) {
    const [, side, bound] = BUCKET.exec(name) ?? [];
    const at = side === '<' ? BOUNDS.indexOf(Number(bound)) : BOUNDS.length - 1;
    if (at >= 0) counts[at] += n;
  }
  return counts;
}

/** Return the index in BOUNDS of the bucket in which this quantile of the releases is, -1 without a release. */
export function quantile(counts, part) {
  const all = counts.reduce((a, b) => a + b, 0);
  let sum = 0;
  for (let at = 0; all > 0 && at < counts.length; at += 1) {
    sum += counts[at];
    if (sum >= part * all) return at;
  }
  return -1;
}

/** Return the releases by bucket, their number and their rate, and the rate of deliveries, between two samples. */
export function between(older, newer) {
  const counts = newer.counts.map((n, at) => n - older.counts[at]);
  const released = newer.released - older.released;
  const seconds = (newer.atMs - older.atMs) / 1_000;
  const deliveredPerSecond = (newer.delivered - older.delivered) / seconds;
  return { counts, released, perSecond: seconds > 0 ? released / seconds : NaN, deliveredPerSecond };
}

/** Return the same as `between` for the last `ms`, null while there is only one sample of that time. */
export function lately(ms) {
  const { history } = broker;
  const newest = history.at(-1);
  const oldest = history.find(sample => sample.atMs >= (newest?.atMs ?? 0) - ms);
  return !oldest || oldest === newest ? null : between(oldest, newest);
}

/** Return the number of pending messages, NaN if the broker does not report it. */
export const waiting = status => status.waiting_messages ?? NaN;
