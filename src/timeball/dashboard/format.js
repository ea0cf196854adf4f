// Figures and texts as people read them.

const COUNT = new Intl.NumberFormat('en');
const DAY = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', year: 'numeric' });
const TIME = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const UNITS = [['d', 86_400_000], ['h', 3_600_000], ['min', 60_000], ['s', 1_000]];
// Controls, and marks that turn the direction of what follows: shown by number, so that no name looks like another.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export const count = n => (Number.isFinite(n) ? COUNT.format(n) : '–');

/** Return a rate with as many digits as mean something. */
export function rate(n) {
  if (!Number.isFinite(n)) return '–';
  return n >= 100 || n === 0 ? COUNT.format(Math.round(n)) : n.toLocaleString('en', { maximumSignificantDigits: 2 });
}

/** Return milliseconds in their largest unit or two: 250 ms, 12 s, 3 min 20 s, 4 d 2 h. */
export function span(ms) {
  if (!Number.isFinite(ms)) return '–';
  if (Math.abs(ms) < 1_000) return `${Math.round(ms)} ms`;
  const parts = [];
  let rest = Math.round(Math.abs(ms) / 1_000) * 1_000;
  for (const [unit, size] of UNITS) {
    const n = Math.floor(rest / size);
    if (n > 0) parts.push(`${n} ${unit}`);
    else if (parts.length) break;
    rest -= n * size;
    if (parts.length === 2) break;
  }
  return (ms < 0 ? '−' : '') + parts.join(' ');
}

/** Return "in 3 min" or "4 s ago". */
export function distance(ms, nowMs) {
  const away = ms - nowMs;
  if (Math.abs(away) < 1_000) return 'now';
  return away > 0 ? `in ${span(away)}` : `${span(-away)} ago`;
}

/** Return an instant in the reader's zone, to the millisecond where it is not on the second. */
export function instant(ms) {
  if (!Number.isFinite(ms)) return '–';
  const when = new Date(ms);
  const rest = ((ms % 1_000) + 1_000) % 1_000;
  const milliseconds = rest ? `.${String(Math.floor(rest)).padStart(3, '0')}` : '';
  return `${DAY.format(when)}, ${TIME.format(when)}${milliseconds}`;
}

/** Return the time of day alone. */
export const clock = ms => TIME.format(new Date(ms));

export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || 'local time';

/** Return bytes in powers of 1,024. */
export function bytes(n) {
  if (!Number.isFinite(n)) return '–';
  const names = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let at = 0;
  let value = n;
  while (value >= 1_024 && at < names.length - 1) {
    value /= 1_024;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${names[at]}`;
}

export const share = part => (Number.isFinite(part)
  ? `${(100 * part).toLocaleString('en', { maximumFractionDigits: part > 0.999 && part < 1 ? 3 : 1 })} %` : '–');

/** Return a text from a message: what cannot be seen is shown as its number, and what is too long is cut. */
export function printable(text, most = 200) {
  const cut = text.length > most ? `${text.slice(0, most)}…` : text;
  return cut.replace(UNSEEN, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);
}

/** Return the two ends of an id: what is between them is in its details. */
export const shortened = id => printable(id.length > 20 ? `${id.slice(0, 8)}…${id.slice(-6)}` : id);

/** Return a body as it is: lines and tabs stay. */
export function printableBody(text) {
  return text.replace(UNSEEN, c => (c === '\n' || c === '\t' ? c
    : `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`));
}
