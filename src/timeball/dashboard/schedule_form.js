// The fields of a recurring schedule, with the next times of its rule as the broker computes them.

import { Problem, ask } from './api.js';
import { field, select } from './dialogs.js';
import { el, keyed, set, show, write } from './dom.js';
import { instant, printable, zone } from './format.js';

const TIMES = 10;
const PAUSE_MS = 250; // without a key press, after which the broker is asked
const ALL = ['cron', 'every', 'rrule', 'at'];
const LOCAL = ['cron', 'rrule', 'at'];
// An error of the broker begins with the key of the rule that causes it.
const KEY = /^([a-z_]+)[=:]/;

const words = text => text.split(/[\s,]+/).filter(Boolean);
const text = (value, attributes = {}) => el('input', { spellcheck: 'false', autocomplete: 'off', value: value ?? '', ...attributes });
const area = (value, rows = 2) => {
  const node = el('textarea', { rows, spellcheck: 'false' });
  node.value = value ?? '';
  return node;
};

/** Return a rule as one line. */
export function ruleText(rule) {
  const { cron, every, rrule, at } = rule;
  const what = cron ?? (every && `every ${every}`) ?? rrule?.replaceAll('\n', ' ') ?? `${at.length === 1 ? '' : `${at.length} times, from `}${at[0]}`;
  const moved = ['before', 'after'].includes(rule.move) ? `moved ${rule.move}` : 'without';
  const more = [rule.starts_at && `from ${rule.starts_at}`, rule.ends_at && `until ${rule.ends_at}`, rule.count && `${rule.count} times`,
    rule.exclude && `${moved} ${rule.exclude.length === 1 ? rule.exclude[0] : `${rule.exclude.length} dates`}`];
  return [what, ...more.filter(Boolean)].join(', ');
}

/** Return the optional keys of a rule, each with the kinds of rules that may have it, its input, and its `read`. */
function options(rule) {
  const choice = (key, labels) => select([['', labels[0]], ...labels.slice(1)], rule[key] ?? '');
  return {
    starts_at: { kinds: ALL, label: 'Not before', input: text(rule.starts_at), hint: 'A local time: 2030-01-31T09:00.' },
    ends_at: { kinds: ALL, label: 'Not after', input: text(rule.ends_at) },
    count: { kinds: ALL, label: 'Number of times', input: text(rule.count, { inputmode: 'numeric' }), read: Number },
    exclude: { kinds: ALL, label: 'Without these dates', input: area((rule.exclude ?? []).join('\n')), hint: 'One in each line: 2030-12-25.', read: words },
    move: { kinds: LOCAL, label: 'Times of an excluded date', input: choice('move', ['Leave out', ['before', 'Move to the date before'], ['after', 'Move to the date after']]) },
    gap: { kinds: LOCAL, label: 'When clocks skip the time', input: choice('gap', ['Send after the gap', ['skip', 'Leave out']]) },
    fold: { kinds: LOCAL, label: 'When clocks show the time twice', input: choice('fold', ['Send the first time', ['both', 'Send both times']]) },
    seconds: { kinds: ['cron'], label: 'Fields of the expression', input: select([['', 'Five'], ['true', 'Six, seconds first']], rule.seconds ? 'true' : ''), read: () => true },
    anchor: { kinds: ['every'], label: 'Counted from', input: text(rule.anchor), hint: 'An instant: 2030-01-31T09:00:00Z.' },
  };
}

/** The fields of a rule. They ask the broker for the next times after each change, and show an error at its field. */
class RuleFields {
  constructor(rule) {
    this.kind = select([['cron', 'Cron expression'], ['every', 'Interval'], ['rrule', 'Calendar rule (RFC 5545)'], ['at', 'List of local times']],
      ALL.find(kind => kind in rule) ?? 'cron');
    this.inputs = { cron: text(rule.cron ?? '0 9 * * 1-5', { class: 'mono' }), every: text(rule.every ?? '15m'),
      rrule: area(rule.rrule ?? 'DTSTART:20300131T090000\nRRULE:FREQ=WEEKLY;BYDAY=TH', 3), at: area((rule.at ?? []).join('\n'), 3) };
    // A rule may be an interval without a zone, which must not get one by a change.
    this.zone = text(rule.zone ?? (Object.keys(rule).length ? '' : zone()), { list: 'zones' });
    this.options = options(rule);
    this.errors = {};
    this.nodes = { cron: this.field('cron', 'Expression', this.inputs.cron, 'Minute, hour, day of the month, month, day of the week.'),
      every: this.field('every', 'Interval', this.inputs.every, '90s, 15m, 1h30m, 2d.'), rrule: this.field('rrule', 'Calendar rule', this.inputs.rrule),
      at: this.field('at', 'Local times', this.inputs.at, 'One in each line: 2030-01-31T09:00.') };
    for (const [key, option] of Object.entries(this.options)) option.node = this.field(key, option.label, option.input, option.hint);
    this.more = el('details', { open: Object.keys(this.options).some(key => key in rule) }, el('summary', {}, 'More about the times'),
      el('div', { class: 'columns' }, ...Object.values(this.options).map(option => option.node)));
    this.status = el('p', { class: 'hint', role: 'status' });
    this.problem = el('p', { class: 'verdict warn', role: 'status', hidden: true });
    this.times = el('ol', { class: 'times' });
    this.node = el('div', { class: 'stack' }, el('div', { class: 'columns' }, field('Rule', this.kind), this.field('zone', 'Time zone', this.zone)),
      ...Object.values(this.nodes), this.more, el('section', { class: 'preview', 'aria-label': 'Next times' }, this.status, this.problem, this.times), zones());
    for (const event of ['input', 'change']) this.node.addEventListener(event, () => this.changed());
    this.changed();
  }

  /** Return a field with a place for its error. */
  field(key, label, input, hint) {
    const error = el('p', { class: 'field-error', id: `rule-${key}-error`, hidden: true });
    input.id = `rule-${key}`;
    const node = field(label, input, hint);
    set(input, 'aria-describedby', [input.getAttribute('aria-describedby'), error.id].filter(Boolean).join(' '));
    node.append(error);
    this.errors[key] = { input, error };
    return node;
  }

  /** Return the rule. Fields of other kinds of rules are left out. */
  read() {
    const kind = this.kind.value;
    const value = this.inputs[kind].value.trim();
    const rule = { [kind]: kind === 'at' ? words(value) : value };
    if (this.zone.value.trim()) rule.zone = this.zone.value.trim();
    for (const [key, { kinds, input, read }] of Object.entries(this.options)) {
      const entered = input.value.trim();
      if (entered && kinds.includes(kind)) rule[key] = read ? read(entered) : entered;
    }
    return rule;
  }

  changed() {
    const kind = this.kind.value;
    for (const [name, node] of Object.entries(this.nodes)) show(node, name === kind);
    for (const { kinds, node } of Object.values(this.options)) show(node, kinds.includes(kind));
    const rule = JSON.stringify(this.read());
    if (rule === this.asked) return;
    this.asked = rule;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.preview(), this.answered ? PAUSE_MS : 0);
  }

  async preview() {
    const { asked } = this;
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    let times = [];
    let problem = null;
    try {
      ({ times } = await ask('POST', ['v1', 'preview'], { body: { rule: JSON.parse(asked), count: TIMES }, signal: asking.signal }));
    } catch (error) {
      problem = error;
    }
    // The user has changed the rule meanwhile, for which another request is planned.
    if (asking.signal.aborted || asked !== this.asked) return;
    this.answered = true;
    this.showProblem(problem);
    const first = times[0];
    write(this.status, problem ? 'No times: the rule is wrong.' : first ? `The next ${times.length === 1 ? 'time' : `${times.length} times`}, in ${this.zone.value.trim() || 'UTC'}:` : 'No time is left.');
    keyed(this.times, times, time => time.due_ms, () => el('li', {}, el('span', { class: 'mono' }), el('span', { class: 'away' })), (node, time) => {
      write(node.firstChild, time.local.replace('T', ' '));
      write(node.lastChild, `  ${instant(time.due_ms)} here`);
    });
  }

  showProblem(problem) {
    const said = problem?.message ?? '';
    const named = KEY.exec(said)?.[1] ?? (/is no time zone/.test(said) ? 'zone' : '');
    const at = problem instanceof Problem && this.errors[named] ? named : '';
    for (const [key, { input, error }] of Object.entries(this.errors)) {
      set(input, 'aria-invalid', key === at && 'true');
      write(error, key === at ? printable(said, 500) : '');
      show(error, key === at);
    }
    if (at in this.options) this.more.open = true;
    write(this.problem, problem && !at ? printable(said, 500) : '');
    show(this.problem, Boolean(problem) && !at);
  }
}

/** Return the time zones that the browser knows, as proposals. The broker decides which ones are valid. */
export const zones = () => el('datalist', { id: 'zones' }, ...Intl.supportedValuesOf('timeZone').map(value => el('option', { value })));

/** Return the filled-in fields of a schedule, and `read()`, which returns all of them, because a PUT replaces all. */
export function scheduleFields(row) {
  const rule = new RuleFields(row.rule ?? {});
  const isNew = row.name === undefined;
  const isBinary = row.base64 !== undefined;
  const topic = text(row.topic);
  const body = area(row.body, 3);
  body.disabled = isBinary;
  const hint = isBinary ? 'It is no text, and stays as it is.' : isNew || row.body !== undefined ? undefined : 'This account may not read it: what you write replaces it.';
  const tag = text(row.tag);
  const keys = text((row.keys ?? []).join(' '));
  const catchUp = select([['latest', 'Send the latest one'], ['all', 'Send all'], ['none', 'Send none']], row.catch_up ?? 'latest');
  const within = text(row.catch_up_within ?? '1d');
  const group = text(row.group);
  const message = el('div', { class: 'columns' }, field('Topic', topic), field('Tag', tag), field('Keys', keys, 'Separated by blanks.'));
  const missed = el('div', { class: 'columns' }, field('Missed times', catchUp), field('Not older than', within, '90s, 30m, 1d.'),
    field('Skip while this group is not done', group, 'Leave it empty to send in any case.'));
  return {
    fields: [rule.node, message, field('Body', body, hint), missed],
    read: () => ({ rule: rule.read(), topic: topic.value.trim(), ...(isBinary ? { base64: row.base64 } : { body: body.value }), tag: tag.value.trim() || null,
      keys: words(keys.value), properties: row.properties ?? {}, catch_up: catchUp.value, catch_up_within: within.value.trim() || '1d',
      overlap: group.value.trim() ? 'skip' : 'allow', group: group.value.trim() }),
  };
}
