// Elements are created once and changed in place, so that a selection and the focus of a user stay.
//
// Texts become text nodes, so no key or body of a message is read as HTML.

const SVG = 'http://www.w3.org/2000/svg';

/** Return a new element. An attribute `on…` is a listener, others are set by `set`. Null children are left out. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Return a new SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else set(node, name, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

/** Set an attribute if it differs. True sets an empty one, and false, null and undefined remove it. */
export function set(node, name, value) {
  if (value === false || value === null || value === undefined) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? '' : String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Set the text of an element if it differs. */
export function write(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Show or hide an element. */
export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/**
 * Let `parent` have one node for each item, in the order of the items. `make(item)` creates a node for a new key, and
 * `update(node, item)` is called for each. Nodes of keys that are missing are removed.
 */
export function keyed(parent, items, keyOf, make, update) {
  const known = parent.keyedNodes ??= new Map();
  const gone = new Map(known);
  let before = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = known.get(key);
    if (node === undefined) {
      node = make(item);
      known.set(key, node);
    }
    gone.delete(key);
    update?.(node, item);
    // A node at its place is not moved, because it would lose the focus.
    if (node === before) before = before.nextSibling;
    else parent.insertBefore(node, before);
  }
  for (const [key, node] of gone) {
    node.remove();
    known.delete(key);
  }
}

/** Return a button. `kind` is its class: primary, danger, link or none. */
export function button(label, act, kind = '', attributes = {}) {
  return el('button', { type: 'button', class: kind || false, onclick: act, ...attributes }, label);
}

/** Return an element for a place without data: a title, an advice, and a command to copy. */
export function emptiness(title, advice, command) {
  return el('div', { class: 'empty' }, el('p', { class: 'empty-title' }, title), el('p', {}, advice),
    command ? el('pre', { tabindex: '0' }, el('code', {}, command)) : null);
}

/** Return a section with a heading. */
export function section(title, ...children) {
  return el('section', { class: 'card' }, el('h2', {}, title), ...children);
}
