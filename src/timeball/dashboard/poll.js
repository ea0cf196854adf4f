// Asks again and again, while the page is seen: slower after errors, and not at all while the tab is hidden.

import { OutOfReach, Problem } from './api.js';

const SLOWEST_MS = 30_000;

/** Whether the broker answers; `lostMs` and `againMs` are of this machine's clock. Tells its listeners of changes. */
export const reach = Object.assign(new EventTarget(), { lostMs: 0, againMs: 0, reason: '', reachedMs: 0 });

function reached() {
  reach.reachedMs = Date.now();
  reach.lostMs = 0;
  reach.dispatchEvent(new Event('change'));
}

function lost(reason, againMs) {
  reach.lostMs ||= Date.now();
  Object.assign(reach, { reason, againMs });
  reach.dispatchEvent(new Event('change'));
}

/** Have all that polls ask now. */
export const askNow = () => reach.dispatchEvent(new Event('ask'));

export class Poll {
  /** `read(signal)` returns a promise, `show(value)` takes what it gave, `fail(error)` a Problem; `loading` is told of each. */
  constructor({ everyMs, read, show, fail, loading }) {
    Object.assign(this, { everyMs, read, show, fail, loading });
    this.failures = 0;
    this.isStopped = true;
    this.onVisible = () => (document.hidden ? this.pause() : this.now());
    this.onAsk = () => this.now();
  }

  start() {
    this.isStopped = false;
    document.addEventListener('visibilitychange', this.onVisible);
    reach.addEventListener('ask', this.onAsk);
    if (!document.hidden) this.now();
    return this;
  }

  stop() {
    this.isStopped = true;
    this.pause();
    document.removeEventListener('visibilitychange', this.onVisible);
    reach.removeEventListener('ask', this.onAsk);
  }

  pause() {
    clearTimeout(this.timer);
    this.asking?.abort();
  }

  /** Ask now, in place of what is under way. */
  async now() {
    if (this.isStopped) return;
    this.pause();
    const asking = (this.asking = new AbortController());
    let pauseMs = this.everyMs;
    try {
      const value = await this.read(asking.signal);
      if (asking.signal.aborted) return;
      this.failures = 0;
      reached();
      this.loading?.done();
      this.show(value);
    } catch (error) {
      if (asking.signal.aborted) return;
      pauseMs = this.failed(error);
    }
    if (!this.isStopped && !document.hidden) this.timer = setTimeout(() => this.now(), pauseMs);
  }

  failed(error) {
    const isPassing = error instanceof OutOfReach || error.isPassing;
    if (!isPassing && !(error instanceof Problem)) throw error;
    this.failures += 1;
    const pauseMs = Math.min(SLOWEST_MS, this.everyMs * 2 ** Math.min(this.failures, 10));
    if (isPassing) {
      lost(error.message, Date.now() + pauseMs);
      this.loading?.lost(error.message);
    } else {
      reached();
      this.loading?.refused();
      this.fail?.(error);
    }
    return pauseMs;
  }
}
