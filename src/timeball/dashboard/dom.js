// Elements made once and changed in place, so that what a person reads, selects or has the focus on stays where it is.
//
// Texts become text nodes and nothing else: a message's key or body is never read as HTML.

const SVG = 'http://www.w3.org/2000/svg';

/** Return a new element. `on…` attributes are listeners; true and false set and leave out an attribute. */
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

/** Set an attribute if it differs; false, null and undefined take it away. */
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

/** Have `parent` hold one node for each item, in their order; nodes of items that were there are kept and updated. */
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
    // A node that stands where it should is not touched: moving it would take the focus from it.
    if (node === before) before = before.nextSibling;
    else parent.insertBefore(node, before);
  }
  for (const [key, node] of gone) {
    node.remove();
    known.delete(key);
  }
}

/** Return a button; `kind`: primary, danger, quiet or plain. */
export function button(label, act, kind = '', attributes = {}) {
  return el('button', { type: 'button', class: kind || false, onclick: act, ...attributes }, label);
}

/** Return a paragraph that stands where there is nothing to show, and says what to do; `command`: one to copy. */
export function emptiness(title, advice, command) {
  return el('div', { class: 'empty' }, el('p', { class: 'empty-title' }, title), el('p', {}, advice),
    command ? el('pre', { tabindex: '0' }, el('code', {}, command)) : null);
}

/** Return a section with a heading. */
export function section(title, ...children) {
  return el('section', { class: 'card' }, el('h2', {}, title), ...children);
}
