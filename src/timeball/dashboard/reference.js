// The reference of the HTTP API: each operation with its parameters, its body, its answers, and a curl command to copy.
//
// The page is built from openapi.json of this broker, so it has exactly the operations of this broker.

import { get } from './api.js';
import { facts, field } from './dialogs.js';
import { button, el, show, write } from './dom.js';

const ROOT = new URL('../', document.baseURI).href.replace(/\/$/, '');
const METHODS = ['get', 'put', 'post', 'patch', 'delete'];
const JSON_TYPE = 'application/json';
const DEPTH = 4; // levels of structs within structs that can be opened

let schemas = {};

// ---- schemas ----------------------------------------------------------------------------------------------------

const nameOf = schema => schema.$ref?.split('/').at(-1);
const resolved = schema => (schema.$ref ? schemas[nameOf(schema)] : schema);
const isNull = schema => schema.type === 'null';
const choices = schema => schema.anyOf?.filter(each => !isNull(each)) ?? [schema];

/** Return the type of a schema in words: "string or integer", "list of Sent". */
function words(schema) {
  if (schema.anyOf) return schema.anyOf.map(words).join(' or ');
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.map(each => JSON.stringify(each)).join(' or ');
  if (schema.type === 'array') return `list of ${words(schema.items ?? {})}`;
  if (schema.additionalProperties?.type) return `object of ${words(schema.additionalProperties)}`;
  if (schema.contentEncoding || schema.format) return `${schema.type} (${schema.contentEncoding ?? schema.format})`;
  return schema.type ?? 'any JSON';
}

/** Return the references to structs that a schema, or the items of its list, may be. */
const structsIn = schema => choices(schema).map(each => (each.type === 'array' ? each.items : each)).filter(each => each?.$ref);

/** Return a paragraph with a text, whose parts in backticks are code. */
function prose(text) {
  return el('p', {}, ...text.split('`').map((part, at) => (at % 2 ? el('code', {}, part) : part)));
}

/** Return the fields of a schema. Structs within them can be opened. */
function fieldsOf(schema, depth = 0) {
  const { properties = {}, required = [], description } = resolved(schema);
  const rows = Object.entries(properties).map(([name, each]) => {
    const otherwise = each.default === null || each.default === undefined ? '' : `; ${JSON.stringify(each.default)} otherwise`;
    // A field that may be left out may always be null, so its type does not name it.
    const type = required.includes(name) ? words(each) : choices(each).map(words).join(' or ');
    const wants = el('span', { class: 'wants' }, `${type}${required.includes(name) ? ', required' : otherwise}`);
    const within = depth < DEPTH ? structsIn(each).map(struct => inner(struct, depth + 1)) : [];
    return [el('code', {}, name), el('div', {}, wants, each.description ? prose(each.description) : null, ...within)];
  });
  const none = schema.$ref ? 'An object without fields.' : `${words(schema)}${description ? `: ${description}` : ''}`;
  return el('div', {}, schema.$ref && description ? prose(description) : null, rows.length ? facts(rows) : el('p', { class: 'hint' }, none));
}

/** Return a struct that can be opened. */
function inner(struct, depth) {
  const node = el('details', { class: 'inner' }, el('summary', {}, nameOf(struct)));
  // Its fields are inserted when it is opened, because a struct may contain itself.
  node.addEventListener('toggle', () => node.childElementCount === 1 && node.append(fieldsOf(struct, depth)));
  return node;
}

/** Return the names of all fields of a schema, for the search. */
function fieldNames(schema, depth = 0) {
  if (depth > DEPTH) return [];
  const structs = structsIn(schema);
  if (structs.length) return structs.flatMap(each => fieldNames(resolved(each), depth + 1));
  return Object.entries(schema.properties ?? {}).flatMap(([name, each]) => [name, ...fieldNames(each, depth + 1)]);
}

// ---- one operation ----------------------------------------------------------------------------------------------

/** Quote a text as one word of a shell. */
const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;

/** Return a curl command with the required parameters and the examples of the document. */
function curlOf(method, path, { parameters, requestBody, responses }) {
  const exampleOf = each => encodeURIComponent(each.example ?? each.name.toUpperCase());
  const place = path.replace(/\{(\w+)\}/g, (_, name) => exampleOf(parameters.find(each => each.name === name)));
  const query = parameters.filter(each => each.in === 'query' && each.required).map(each => `${each.name}=${exampleOf(each)}`);
  const isEndless = Object.keys(responses[200]?.content ?? {}).includes('text/event-stream');
  const verb = method === 'get' || (method === 'post' && requestBody) ? '' : ` -X ${method.toUpperCase()}`;
  const first = `curl -s${isEndless ? 'N' : ''}${verb} ${quoted(`${ROOT}${place}${query.length ? `?${query.join('&')}` : ''}`)}`;
  if (!requestBody) return first;
  const [struct] = choices(requestBody.content[JSON_TYPE].schema);
  const body = JSON.stringify(resolved(struct).examples?.[0] ?? {});
  return `${first} \\\n  -H ${quoted(`content-type: ${JSON_TYPE}`)} -d ${quoted(body)}`;
}

function parametersOf(parameters) {
  return facts(parameters.map(({ name, in: where, required, description, example }) => [el('code', {}, name), el('div', {},
    el('span', { class: 'wants' }, `in the ${where}${required ? ', required' : ''}${example === undefined ? '' : `, as in ${example}`}`),
    description ? prose(description) : null)]));
}

function bodiesOf(content) {
  return Object.entries(content).map(([type, { schema }]) => el('div', { class: 'stack' }, el('p', { class: 'wants' }, type),
    ...choices(schema).map(each => (Object.keys(each).length ? el('div', {}, each.type === 'array' ? el('p', {}, `A ${words(each)}.`) : fieldsOf(each))
      : el('p', { class: 'hint' }, 'Its fields are in the text of the documentation.')))));
}

function answersOf(responses) {
  return Object.entries(responses).map(([status, { description, content }]) => (status === 'default'
    ? el('p', {}, 'Otherwise ', description, ': ', el('a', { href: '#Problem' }, 'Problem'))
    : el('div', {}, el('p', {}, el('strong', {}, status), ` ${description}`), ...bodiesOf(content))));
}

const part = (title, ...children) => el('div', {}, el('h4', {}, title), ...children);

function operationNode({ method, path, operation }) {
  const { operationId, summary, parameters, requestBody, responses } = operation;
  return el('details', { class: 'operation', id: operationId },
    el('summary', {}, el('h3', {}, el('span', { class: `method ${method}` }, method.toUpperCase()), el('code', {}, path)), el('span', {}, summary)),
    el('div', { class: 'stack' },
      part('Example', el('pre', { class: 'body', tabindex: '0', 'aria-label': `curl for ${operationId}` }, curlOf(method, path, operation))),
      parameters.length ? part('Parameters', parametersOf(parameters)) : null,
      requestBody ? part('Body', ...bodiesOf(requestBody.content)) : null,
      part('Answers', ...answersOf(responses))));
}

// ---- the page ---------------------------------------------------------------------------------------------------

/** Return the operations of a document, each with the words by which the search finds it. */
function operationsIn(document) {
  return Object.entries(document.paths).flatMap(([path, methods]) => METHODS.filter(method => methods[method]).map(method => {
    const operation = methods[method];
    const bodies = [operation.requestBody, ...Object.values(operation.responses)].flatMap(each => Object.values(each?.content ?? {}));
    const terms = [method, path, operation.operationId, operation.summary, ...operation.parameters.map(each => each.name),
      ...bodies.flatMap(each => fieldNames(each.schema))];
    return { method, path, operation, tag: operation.tags?.[0] ?? '', words: terms.join(' ').toLowerCase() };
  }));
}

class Reference {
  constructor(document) {
    schemas = document.components.schemas;
    this.operations = operationsIn(document);
    const search = el('input', { id: 'search', type: 'search', spellcheck: 'false', autocomplete: 'off', oninput: () => this.filter(search.value) });
    this.search = search;
    this.found = el('p', { class: 'hint', role: 'status' });
    this.nothing = el('p', { class: 'empty', hidden: true }, 'No operation has all of these words.');
    this.sections = [...new Set(this.operations.map(each => each.tag))].map(tag => this.section(tag));
    const problem = el('details', { class: 'operation', id: 'Problem' }, el('summary', {}, el('h3', {}, 'Problem'), el('span', {}, 'What every error answers, by RFC 9457.')),
      el('div', { class: 'stack' }, fieldsOf({ $ref: '#/components/schemas/Problem' })));
    this.node = el('div', { class: 'stack' },
      el('div', { class: 'toolbar' }, el('div', { class: 'wide' }, field('Search', search, 'A method, a path, a field. The key / leads here.')),
        button('Open all', () => this.openAll(true)), button('Close all', () => this.openAll(false))),
      this.found, this.nothing, el('div', { class: 'operations' }, ...this.sections.map(each => each.node), problem));
    this.filter('');
  }

  section(tag) {
    const rows = this.operations.filter(each => each.tag === tag).map(each => ({ ...each, node: operationNode(each),
      link: el('li', {}, el('a', { href: `#${each.operation.operationId}` }, `${each.method.toUpperCase()} ${each.path.replace(`/v1/${tag}/`, '…/')}`)) }));
    const [heading, title] = [el('h2', {}, tag), el('h2', {}, tag)];
    return { rows, node: el('section', {}, heading, ...rows.map(each => each.node)), contents: el('div', {}, title, el('ul', {}, ...rows.map(each => each.link))) };
  }

  /** Show only the operations that have all words of a text, and their number. */
  filter(text) {
    const wanted = text.toLowerCase().split(/\s+/).filter(Boolean);
    let n = 0;
    for (const { rows, node, contents } of this.sections) {
      const fits = rows.filter(each => wanted.every(word => each.words.includes(word)));
      for (const each of rows) for (const one of [each.node, each.link]) show(one, fits.includes(each));
      for (const one of [node, contents]) show(one, fits.length > 0);
      n += fits.length;
    }
    write(this.found, `${n} of ${this.operations.length} operations.`);
    show(this.nothing, n === 0);
  }

  openAll(isOpen) {
    for (const each of this.node.querySelectorAll('.operation:not([hidden])')) each.open = isOpen;
  }

  /** Open the operation that the address names, as reference.html#send, and end a search that hides it. */
  follow() {
    const node = this.node.querySelector(`#${CSS.escape(location.hash.slice(1) || 'none')}`);
    if (!node?.matches('.operation')) return;
    if (node.hidden || node.closest('section')?.hidden) {
      this.search.value = '';
      this.filter('');
    }
    node.open = true;
    node.scrollIntoView();
    node.firstChild.focus();
  }
}

async function begin() {
  const about = document.getElementById('about');
  let described;
  try {
    described = await get(['openapi.json']);
  } catch (error) {
    write(about, `The description could not be read: ${error.message}.`);
    return;
  }
  const reference = new Reference(described);
  write(about, `Timeball ${described.info.version}. The examples are for this broker; where it asks who calls, add -H 'authorization: Bearer KEY:SECRET'.`);
  document.getElementById('page').append(reference.node);
  document.getElementById('contents').append(...reference.sections.map(each => each.contents));
  addEventListener('hashchange', () => reference.follow());
  addEventListener('keydown', event => {
    if (event.key !== '/' || event.target.matches('input, select')) return;
    event.preventDefault();
    reference.search.focus();
  });
  document.getElementById('skip').addEventListener('click', event => {
    event.preventDefault();
    document.getElementById('main').focus();
  });
  reference.follow();
}

begin();
