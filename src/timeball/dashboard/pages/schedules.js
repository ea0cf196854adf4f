// Recurring schedules: the list, the view of a day, and the dialogs that create, change or end one.

import { Problem, ask, get } from '../api.js';
import { broker } from '../broker.js';
import { DayView } from '../day_view.js';
import { addOptions, confirm, facts, field, select, showDialog } from '../dialogs.js';
import { button, el, emptiness, set, show, write } from '../dom.js';
import { count, distance, instant, printable } from '../format.js';
import { bdi } from '../messages.js';
import { Loading } from '../loading.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { ruleText, scheduleFields } from '../schedule_form.js';
import { DataTable } from '../table.js';

const EVERY_MS = 5_000;
const ROWS = 25;
const TONES = { active: 'good', paused: 'warn', failed: 'bad' };
const MAKE = `curl -s -X PUT ${location.origin}/v1/schedules/report -H 'content-type: application/json' \\
  -d '{"rule": {"cron": "0 9 * * 1-5", "zone": "Europe/Berlin"}, "topic": "reports", "body": "make the report"}'`;

export const schedules = {
  id: 'schedules',
  title: 'Schedules',
  open: root => new Schedules(root),
};

class Schedules {
  constructor(root) {
    this.pages = [''];
    this.refused = refusal();
    const done = () => this.poll.now();
    this.table = new DataTable({
      caption: 'Recurring schedules, by name', keyOf: row => row.name,
      empty: emptiness('No schedules.', 'A schedule sends a message at each time of a rule:', MAKE),
      columns: [
        { label: 'Schedule', kind: 'name', make: row => button(printable(row().name, 80), () => look(row()), 'link mono') },
        { label: 'Rule', kind: 'what', make: () => [el('bdi', { class: 'text mono' }), el('bdi', { class: 'text away' })], update: showRule },
        { label: 'Topic', kind: 'name', make: () => el('bdi', { class: 'text mono' }), update: (cell, row) => write(cell.firstChild, printable(row.topic, 80)) },
        { label: 'Next', make: () => [el('span', { class: 'when' }), el('span', { class: 'away' })], update: showNext },
        { label: 'State', make: () => [el('span', { class: 'state' }), el('bdi', { class: 'text away' })], update: showState },
        { label: 'Actions', isUnseen: true, kind: 'actions-cell many admin', make: row => actions(row, done), update: showActions },
      ],
    });
    this.topic = select([['', 'All topics']], '', { id: 'schedules-topic', onchange: () => this.turnTo(['']) });
    this.back = button('‹ Previous', () => this.turnTo(this.pages.slice(0, -1)));
    this.next = button('Next ›', () => this.turnTo([...this.pages, this.nextPage]));
    this.day = new DayView();
    const bar = el('div', { class: 'toolbar' }, field('Topic', this.topic), el('div', { class: 'admin' }, button('New schedule', () => make(done), 'primary')));
    this.loading = new Loading(this.table.node, this.day.node);
    root.append(this.refused.node, el('section', { class: 'card' }, bar, this.loading.node, this.table.node, el('div', { class: 'actions' }, this.back, this.next)), this.day.node);
    this.clock = setInterval(() => !document.hidden && this.table.refresh(), 1_000);
    this.poll = new Poll({ everyMs: EVERY_MS, read: signal => get(['v1', 'schedules'], { topic: this.topic.value, max: ROWS, page: this.pages.at(-1) }, signal),
      show: found => this.show(found), fail: error => this.refused.show(error), loading: this.loading }).start();
    show(this.back, false);
    show(this.next, false);
  }

  close() {
    this.poll.stop();
    this.day.close();
    clearInterval(this.clock);
  }

  turnTo(pages) {
    this.pages = pages;
    this.poll.now();
  }

  show({ schedules: rows, next_page: nextPage }) {
    this.refused.show(null);
    this.nextPage = nextPage;
    addOptions(this.topic, rows.map(row => row.topic));
    this.table.show(rows);
    this.day.showRows(rows);
    show(this.back, this.pages.length > 1);
    show(this.next, Boolean(nextPage));
  }
}

function showRule(cell, { rule }) {
  write(cell.children[0], printable(ruleText(rule), 200));
  write(cell.children[1], rule.zone ?? 'UTC');
}

function showNext(cell, { next }) {
  write(cell.children[0], next ? instant(next.due_ms) : '–');
  write(cell.children[1], next ? distance(next.due_ms, broker.nowMs()) : '');
}

function showState(cell, { state, error }) {
  write(cell.children[0], state);
  set(cell.children[0], 'class', `state ${TONES[state] ?? ''}`);
  write(cell.children[1], printable(error ?? '', 200));
}

// ---- actions on a schedule ----------------------------------------------------------------------------------------

function actions(row, done) {
  return el('span', { class: 'actions' },
    button('Run now', () => run(row(), done)),
    button('Pause', () => pause(row(), done), '', { 'data-verb': 'pause' }),
    button('Resume', () => resume(row(), done), '', { 'data-verb': 'resume' }),
    button('Change', () => change(row(), done)),
    button('Delete', () => remove(row(), done)));
}

function showActions(cell, { state }) {
  const may = { pause: state === 'active', resume: state === 'paused' || state === 'failed' };
  for (const each of cell.querySelectorAll('[data-verb]')) show(each, may[each.dataset.verb]);
}

const pathOf = (name, ...verb) => ['v1', 'schedules', name, ...verb];
const about = row => [['Schedule', bdi(row.name)], ['Rule', bdi(ruleText(row.rule), 500)], ['Time zone', row.rule.zone && bdi(row.rule.zone)], ['Topic', bdi(row.topic)]];
const nextText = ({ next, state }) => (next ? `The next time is ${instant(next.due_ms)}.` : `It is ${state}.`);

/** Show a schedule, and the states of the messages of its last times. */
async function look(row) {
  let times = [];
  try {
    times = (await get(pathOf(row.name, 'history'))).occurrences;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
  }
  // The broker knows no message of still earlier times: the schedule did not exist, or the log has deleted them.
  const known = times.slice(0, times.findLastIndex(({ state }) => state !== 'unknown') + 1);
  const past = known.map(({ due_ms: ms, state, reason }) => [instant(ms), reason ? `${state}, ${printable(reason, 80)}` : state]);
  showDialog('Schedule', el('div', { class: 'stack' }, facts([...about(row), ['State', row.state], ['Sent so far', count(row.runs)], ['Missed times', `${row.catch_up}, within ${row.catch_up_within}`],
    ['Skips for the group', row.group && bdi(row.group)]]), el('h3', {}, 'Its last times'), past.length ? facts(past) : el('p', { class: 'hint' }, 'None is known.')));
}

function run(row, done) {
  confirm({ title: 'Send a message of this schedule now?', about: about(row), note: 'Its next time stays.', label: 'Send it', done,
    act: async () => [`Sent: ${printable((await ask('POST', pathOf(row.name, 'run'))).id)}`, 'good'] });
}

function pause(row, done) {
  confirm({ title: 'Pause this schedule?', about: about(row), note: 'Its pending message is cancelled. None follows until you resume it.', label: 'Pause', done,
    act: async () => {
      await ask('POST', pathOf(row.name, 'pause'));
      return ['Paused.', 'good'];
    } });
}

function resume(row, done) {
  confirm({ title: 'Resume this schedule?', about: about(row), note: `Of the times meanwhile, it sends: ${row.catch_up}.`, label: 'Resume', done,
    act: async () => [`Resumed. ${nextText(await ask('POST', pathOf(row.name, 'resume')))}`, 'good'] });
}

function remove(row, done) {
  confirm({ title: 'Delete this schedule?', about: about(row), note: 'Its pending message is cancelled. This cannot be taken back.', label: 'Delete the schedule', isDangerous: true, done,
    act: async () => {
      await ask('DELETE', pathOf(row.name));
      return ['Deleted.', 'good'];
    } });
}

function make(done) {
  const name = el('input', { spellcheck: 'false', autocomplete: 'off' });
  const form = scheduleFields({});
  confirm({ title: 'New schedule', fields: [field('Name', name), ...form.fields], label: 'Make it', done, act: async () => {
    const wanted = name.value.trim();
    if (!wanted) return ['Give it a name.', 'again'];
    // A PUT would replace the existing schedule.
    if (await exists(wanted)) return ['There is a schedule of this name: change that one.', 'again'];
    return [`Made. ${nextText(await ask('PUT', pathOf(wanted), { body: form.read() }))}`, 'good'];
  } });
}

async function exists(name) {
  try {
    await get(pathOf(name));
    return true;
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return false;
    throw error;
  }
}

function change(row, done) {
  const form = scheduleFields(row);
  confirm({ title: 'Change this schedule', about: [['Schedule', bdi(row.name)]], fields: form.fields, label: 'Change it', done,
    act: async () => [`Changed. ${nextText(await ask('PUT', pathOf(row.name), { body: form.read() }))}`, 'good'] });
}
