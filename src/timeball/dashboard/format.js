// Numbers, times and texts as users read them. A number that is not finite is shown as a dash.

const COUNT = new Intl.NumberFormat('en');
const DAY = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', year: 'numeric' });
const TIME = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const UNITS = [['d', 86_400_000], ['h', 3_600_000], ['min', 60_000], ['s', 1_000]];
// Control characters, and marks that change the direction of a text. They are shown by number, so that no name looks
// like another one.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export const count = n => (Number.isFinite(n) ? COUNT.format(n) : '–');

/** Return a rate: from 100 on without decimals, below with two significant digits. */
export function rate(n) {
  if (!Number.isFinite(n)) return '–';
  return n >= 100 || n === 0 ? COUNT.format(Math.round(n)) : n.toLocaleString('en', { maximumSignificantDigits: 2 });
}

/** Return milliseconds in at most two units: 250 ms, 12 s, 3 min 20 s, 4 d 2 h. */
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

/** Return "in 3 min", "now" or "4 s ago". */
export function distance(ms, nowMs) {
  const away = ms - nowMs;
  if (Math.abs(away) < 1_000) return 'now';
  return away > 0 ? `in ${span(away)}` : `${span(-away)} ago`;
}

/** Return an instant in the time zone of the browser, with milliseconds unless they are 0. */
export function instant(ms) {
  if (!Number.isFinite(ms)) return '–';
  const when = new Date(ms);
  const rest = ((ms % 1_000) + 1_000) % 1_000;
  const milliseconds = rest ? `.${String(Math.floor(rest)).padStart(3, '0')}` : '';
  return `${DAY.format(when)}, ${TIME.format(when)}${milliseconds}`;
}

/** Return the time of day of an instant, without its date. */
export const clock = ms => TIME.format(new Date(ms));

export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || 'local time';

/** Return a number of bytes in a unit that is a power of 1,024. */
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

/** Return a text of a user, with invisible characters by number, and cut after `most` characters. */
export function printable(text, most = 200) {
  const cut = text.length > most ? `${text.slice(0, most)}…` : text;
  return cut.replace(UNSEEN, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);
}

/** Return a long id without its middle. The details of a message show the whole id. */
export const shortened = id => printable(id.length > 20 ? `${id.slice(0, 8)}…${id.slice(-6)}` : id);

/** Return a body with the characters that cannot be seen by number, except line ends and tabs. */
export function printableBody(text) {
  return text.replace(UNSEEN, c => (c === '\n' || c === '\t' ? c
    : `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`));
}
