// Requests to the HTTP API: docs/http.md, and nothing else.

const BASE = new URL('../', document.baseURI);
const ACCOUNT = 'timeball-account';
const ANSWER_MS = 20_000;

/** An answer that is a problem document: the broker was reached, and says why it did not do it. */
export class Problem extends Error {
  constructor(status, value) {
    super(value.detail || value.title || `status ${status}`);
    this.status = status;
    this.code = value.code || `status ${status}`;
    this.value = value;
  }

  /** Whether the same request may be granted later, by itself. */
  get isPassing() {
    return this.status === 429 || this.status >= 500;
  }
}

/** No answer: the broker does not run, or something on the way is broken. */
export class OutOfReach extends Error {}

/** Ask; `path` is a list of parts, each of which may be any text. Raises Problem, OutOfReach. */
export async function ask(method, path, { query = {}, body, signal } = {}) {
  const target = new URL(path.map(encodeURIComponent).join('/'), BASE);
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== '') target.searchParams.set(name, value);
  }
  const headers = {};
  if (body !== undefined) headers['content-type'] = 'application/json';
  if (account()) headers.authorization = `Bearer ${account()}`;
  const limit = AbortSignal.timeout(ANSWER_MS);
  let answer;
  let value;
  try {
    answer = await fetch(target, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: 'no-store',
      credentials: 'omit',
      redirect: 'error',
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
    });
    value = JSON.parse((await answer.text()) || '{}');
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new OutOfReach(answer ? `an answer that is no JSON (status ${answer.status})` : 'no answer', { cause: error });
  }
  if (answer.ok) return value;
  const problem = new Problem(answer.status, value);
  if (answer.status === 401) document.dispatchEvent(new CustomEvent('timeball-unauthorized', { detail: problem }));
  throw problem;
}

export const get = (path, query, signal) => ask('GET', path, { query, signal });

/** Return all rows of a list that comes in pages; `name` is that of the rows in an answer. */
export async function getAll(path, name, signal) {
  const rows = [];
  for (let page = null, isFirst = true; isFirst || page; isFirst = false) {
    const found = await get(path, { page }, signal);
    rows.push(...found[name]);
    page = found.next_page;
  }
  return rows;
}

// ---- the account ------------------------------------------------------------------------------------------------
// In sessionStorage: it is gone with the tab, and no other site's page can read it.

export const account = () => sessionStorage.getItem(ACCOUNT) ?? '';
export const accountName = () => account().split(':')[0];
export const signIn = (accessKey, secretKey) => sessionStorage.setItem(ACCOUNT, `${accessKey}:${secretKey}`);
export const signOut = () => sessionStorage.removeItem(ACCOUNT);
