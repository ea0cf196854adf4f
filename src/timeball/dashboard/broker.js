// GET /v1/broker every two seconds, whatever page is open: who we are talking to, and how punctual it has been lately.

import { get } from './api.js';
import { Poll, reach } from './poll.js';

const EVERY_MS = 2_000;
const KEPT_MS = 10 * 60_000;
const BUCKET = /^([<>])=?(\d+)ms$/;

/** What the broker said last, and a history of it; an event `change` with each answer, `refused` with each refusal. */
export const broker = Object.assign(new EventTarget(), {
  status: null,
  history: [], // of samples, the oldest first
  mayAdmin: false,
  problem: null, // why it refuses to say more
  aheadMs: 0, // of the broker's clock, before this machine's
  /** Return the broker's time. */
  nowMs: () => Date.now() + broker.aheadMs,
});

const poll = new Poll({ everyMs: EVERY_MS, read: signal => get(['v1', 'broker'], {}, signal), show: take,
  fail: problem => {
    broker.problem = problem;
    broker.dispatchEvent(new Event('refused'));
  } });

/** Call `draw` with each answer, and have a page say what is missing until the first; return what ends that. */
export function follow(loading, refused, draw) {
  const changed = () => {
    if (!broker.status) return;
    refused.show(null);
    loading.done();
    draw();
  };
  const refuse = () => {
    loading.refused();
    refused.show(broker.problem);
  };
  const lost = () => reach.lostMs && loading.lost(reach.reason);
  const heard = [[broker, 'change', changed], [broker, 'refused', refuse], [reach, 'change', lost]];
  for (const [from, name, act] of heard) from.addEventListener(name, act);
  changed();
  if (!broker.status && broker.problem) refuse();
  return () => heard.forEach(([from, name, act]) => from.removeEventListener(name, act));
}

export const watchBroker = () => poll.isStopped && poll.start();
export const leaveBroker = () => {
  poll.stop();
  Object.assign(broker, { status: null, mayAdmin: false, problem: null });
};

function take(status) {
  const now = Date.now();
  broker.aheadMs = status.now_ms - now;
  const before = broker.status;
  // Another process, whose counts begin at nought.
  if (before && (before.pid !== status.pid || status.lateness.released < before.lateness.released)) broker.history = [];
  broker.status = status;
  broker.problem = null;
  broker.mayAdmin = status.may_admin === true;
  broker.history.push({ atMs: now, released: status.lateness.released, counts: bucketsOf(status.lateness),
    delivered: status.delivered });
  while (broker.history[0].atMs < now - KEPT_MS) broker.history.shift();
  broker.dispatchEvent(new Event('change'));
}

// ---- lateness -----------------------------------------------------------------------------------------------------

export const BOUNDS = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, Infinity];

/** Return how many were released at most so late, by the place in BOUNDS. */
export function bucketsOf(lateness) {
  const counts = new Array(BOUNDS.length).fill(0);
  for (const [name, n] of Object.entries(lateness.buckets ?? {})) {
    const [, side, bound] = BUCKET.exec(name) ?? [];
    const at = side === '<' ? BOUNDS.indexOf(Number(bound)) : BOUNDS.length - 1;
    if (at >= 0) counts[at] += n;
  }
  return counts;
}

/** Return the place in BOUNDS within which this part of the releases lay; -1 where there were none. */
export function quantile(counts, part) {
  const all = counts.reduce((a, b) => a + b, 0);
  let sum = 0;
  for (let at = 0; all > 0 && at < counts.length; at += 1) {
    sum += counts[at];
    if (sum >= part * all) return at;
  }
  return -1;
}

/** Return what was released and delivered between two samples. */
export function between(older, newer) {
  const counts = newer.counts.map((n, at) => n - older.counts[at]);
  const released = newer.released - older.released;
  const seconds = (newer.atMs - older.atMs) / 1_000;
  const deliveredPerSecond = (newer.delivered - older.delivered) / seconds;
  return { counts, released, perSecond: seconds > 0 ? released / seconds : NaN, deliveredPerSecond };
}

/** Return what was released in the last `ms`; null while there is nothing to compare with. */
export function lately(ms) {
  const { history } = broker;
  const newest = history.at(-1);
  const oldest = history.find(sample => sample.atMs >= (newest?.atMs ?? 0) - ms);
  return !oldest || oldest === newest ? null : between(oldest, newest);
}

/** Return how many messages wait. */
export const waiting = status => status.waiting_messages ?? NaN;
