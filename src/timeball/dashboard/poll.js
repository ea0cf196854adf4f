// Repeats a request while its page is open: less often after errors, and not while the tab is hidden.

import { OutOfReach, Problem } from './api.js';

const SLOWEST_MS = 30_000;

/**
 * Whether the broker answers. `reachedMs` is the time of the last answer. While it does not answer, `lostMs` is the time
 * since when, `againMs` that of the next attempt, and `reason` the error. Times are by the clock of this machine.
 *
 * An event `change` follows each answer and each failure. The event `ask` makes all polls ask.
 */
export const reach = Object.assign(new EventTarget(), { lostMs: 0, againMs: 0, reason: '', reachedMs: 0 });

function noteAnswer() {
  reach.reachedMs = Date.now();
  reach.lostMs = 0;
  reach.dispatchEvent(new Event('change'));
}

function noteFailure(reason, againMs) {
  reach.lostMs ||= Date.now();
  Object.assign(reach, { reason, againMs });
  reach.dispatchEvent(new Event('change'));
}

/** Let all polls ask now. */
export const askNow = () => reach.dispatchEvent(new Event('ask'));

export class Poll {
  /**
   * `read(signal)` makes the request, `show(value)` gets its result, and `fail(problem)` a refusal.
   *
   * A Loading as `loading` shows the state until the first answer.
   */
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

  /** Ask now. Aborts a request under way, and plans the next one. */
  async now() {
    if (this.isStopped) return;
    this.pause();
    const asking = (this.asking = new AbortController());
    let pauseMs = this.everyMs;
    try {
      const value = await this.read(asking.signal);
      if (asking.signal.aborted) return;
      this.failures = 0;
      noteAnswer();
      this.loading?.done();
      this.show(value);
    } catch (error) {
      if (asking.signal.aborted) return;
      pauseMs = this.failed(error);
    }
    if (!this.isStopped && !document.hidden) this.timer = setTimeout(() => this.now(), pauseMs);
  }

  /** Report a failure, and return the pause until the next attempt. Raises an error that is not about the broker. */
  failed(error) {
    const isPassing = error instanceof OutOfReach || error.isPassing;
    if (!isPassing && !(error instanceof Problem)) throw error;
    this.failures += 1;
    const pauseMs = Math.min(SLOWEST_MS, this.everyMs * 2 ** Math.min(this.failures, 10));
    if (isPassing) {
      noteFailure(error.message, Date.now() + pauseMs);
      this.loading?.lost(error.message);
    } else {
      noteAnswer();
      this.loading?.refused();
      this.fail?.(error);
    }
    return pauseMs;
  }
}
