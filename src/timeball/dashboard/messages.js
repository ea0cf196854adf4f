// The views of a message, and the dialogs that cancel or reschedule a pending one.

import { Problem, ask } from './api.js';
import { confirm, facts, field } from './dialogs.js';
import { el } from './dom.js';
import { bytes, count, distance, instant, printable, printableBody, zone } from './format.js';
import { broker } from './broker.js';

const TEXT_SHOWN = 64 * 1024;
const BYTES_SHOWN = 512;
const FINAL = new Set([404, 409, 410]); // statuses that are a verdict: another attempt would get the same

/** Return a node with a text of a user. The direction of the text does not change the text around it. */
export const bdi = (text, most) => el('bdi', { class: 'text mono' }, printable(text, most));

/** Return a view of a body: its text, or its first bytes in hexadecimal if it is no text. */
export function bodyView({ body, base64, body_cut: isCut, size_bytes: size }) {
  if (body === undefined && base64 === undefined) return el('p', { class: 'hint' }, 'The body is not shown here.');
  const [text, note] = body !== undefined ? textBody(body) : binaryBody(base64);
  const ofSize = isCut && size ? `, of ${bytes(size)}` : '';
  const shown = note || isCut ? el('p', { class: 'hint' }, `${note || 'its beginning'}${ofSize}`) : null;
  if (text === '') return el('p', { class: 'hint' }, 'empty');
  return el('div', {}, el('pre', { class: 'body', tabindex: '0', 'aria-label': 'Body' }, text), shown);
}

/** Return a text to show and a note, empty unless the text is cut. */
function textBody(body) {
  let text = body;
  try {
    // JSON is formatted, except with numbers of so many digits that parsing would change them.
    if (/^\s*[[{]/.test(body) && body.length < TEXT_SHOWN && !/\d{16}/.test(body)) text = JSON.stringify(JSON.parse(body), null, 2);
  } catch {
    // The text is no JSON, and is shown unchanged.
  }
  const cut = text.length > TEXT_SHOWN;
  return [printableBody(cut ? text.slice(0, TEXT_SHOWN) : text), cut ? `the first ${count(TEXT_SHOWN)} characters` : ''];
}

/** Return lines of 16 bytes in hexadecimal, and a note. */
function binaryBody(base64) {
  const data = atob(base64);
  const lines = [];
  for (let at = 0; at < Math.min(data.length, BYTES_SHOWN); at += 16) {
    const part = [...data.slice(at, at + 16)];
    const hex = part.map(c => c.charCodeAt(0).toString(16).padStart(2, '0')).join(' ').padEnd(48);
    lines.push(`${at.toString(16).padStart(4, '0')}  ${hex} ${part.map(c => (c >= ' ' && c <= '~' ? c : '.')).join('')}`);
  }
  return [lines.join('\n'), `bytes that are no text${data.length > BYTES_SHOWN ? `; the first ${BYTES_SHOWN} of ${count(data.length)}` : ''}`];
}

/** Return properties as a list, null without a property. */
export function propertiesView(properties) {
  const pairs = Object.entries(properties ?? {});
  return pairs.length ? el('div', {}, el('h3', {}, 'Properties'),
    facts(pairs.map(([name, value]) => [printable(name, 80), bdi(String(value), 500)]))) : null;
}

/** Return the facts by which a user recognizes a message: topic, id, keys and due time. */
export function about(message) {
  return [['Topic', message.topic && bdi(message.topic)], ['Id', message.id && bdi(message.id)],
    ['Keys', message.keys?.length ? bdi([message.keys].flat().join(' ')) : ''],
    ['Due', message.due_ms !== undefined ? `${instant(message.due_ms)}, ${distance(message.due_ms, broker.nowMs())}` : '']];
}

// ---- actions on a pending message ---------------------------------------------------------------------------------

/** Cancel a message after a confirmation. */
export function cancelMessage(message, done) {
  confirm({ title: 'Cancel this message?', about: about(message), note: 'It will not be delivered. This cannot be taken back.',
    label: 'Cancel the message', isDangerous: true, done,
    act: () => verdictOf(message, 'DELETE', undefined, () => 'Cancelled: it will not be delivered.') });
}

/** Ask for another due time, and reschedule the message. */
export function rescheduleMessage(message, done) {
  const at = el('input', { type: 'datetime-local', step: '1' });
  const after = el('input', { placeholder: '30m', spellcheck: 'false', autocomplete: 'off' });
  confirm({ title: 'Move this message to another instant?', about: about(message), label: 'Move it', done,
    fields: [field('At', at, `In ${zone()}.`), field('Or after', after, 'From now on: 90s, 30m, 1h30m, 2d.')],
    act: () => {
      const dueMs = at.value ? new Date(at.value).getTime() : NaN;
      if (Number.isFinite(dueMs) === (after.value.trim() !== '')) return ['Fill in one of the two.', 'again'];
      const body = Number.isFinite(dueMs) ? { at: dueMs } : { after: after.value.trim() };
      return verdictOf(message, 'PATCH', body, answer => `Moved: it is due ${instant(answer.due_ms)}.`);
    } });
}

/** Make a request about a message. Returns a verdict for `confirm`. Raises Problem unless the refusal is final. */
async function verdictOf({ id, topic }, method, body, sentence) {
  try {
    return [sentence(await ask(method, ['v1', 'messages', id], { query: { topic }, body })), 'good'];
  } catch (error) {
    if (error instanceof Problem && FINAL.has(error.status)) return [`${error.message} (${error.code}).`, 'warn'];
    throw error;
  }
}
