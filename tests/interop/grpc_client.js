'use strict';
// The stock JavaScript client for gRPC, npm's `rocketmq-client-nodejs`, driven by JSON lines: requests on stdin, answers
// and events on stdout. Runs with its packages in NODE_PATH: `node grpc_client.js ENDPOINT`.
//
// It decides nothing: what to send, when to fail and what must have come is the tests' business.

const readline = require('readline');
const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = require('rocketmq-client-nodejs');

const endpoint = process.argv[2];
const SQL = 2;
const RESOLUTIONS = { UNKNOWN: 0, COMMIT: 1, ROLLBACK: 2 };
const running = new Map();
const received = new Map();
const quiet = { info() {}, debug() {}, warn(...told) { console.error(...told); }, error(...told) { console.error(...told); } };

function emit(line) {
  process.stdout.write(JSON.stringify(line) + '\n');
}

const options = request => ({
  endpoints: request.endpoint || endpoint, namespace: '', logger: quiet, requestTimeout: 10000,
  sslEnabled: Boolean(request.tls),
  ...(request.access_key ? { sessionCredentials: { accessKey: request.access_key, accessSecret: request.secret_key } } : {}),
});

const consumerOptions = request => ({
  ...options(request), consumerGroup: request.group,
  subscriptions: new Map([[ request.topic,
    request.sql ? new FilterExpression(request.sql, SQL) : new FilterExpression(request.expression || '*') ]]),
});

function told(message) {
  return {
    topic: message.topic,
    body: message.body.toString(),
    tag: message.tag || null,
    keys: [ ...message.keys ].sort(),
    message_id: message.messageId,
    born_ms: message.bornTimestamp.getTime(),
    due_ms: message.deliveryTimestamp ? message.deliveryTimestamp.getTime() : null,
    message_group: message.messageGroup || null,
    attempt: message.deliveryAttempt,
    corrupted: Boolean(message.corrupted),
    properties: Object.fromEntries(message.properties),
  };
}

function message(request) {
  return {
    topic: request.topic,
    body: Buffer.from(request.body),
    tag: request.tag,
    keys: request.keys ? [ request.keys ] : [],
    messageGroup: request.message_group,
    properties: new Map(Object.entries(request.properties || {}).map(([ name, value ]) => [ name, String(value) ])),
    ...(request.due_ms ? { deliveryTimestamp: new Date(request.due_ms) } : {}),
  };
}

const sent = receipt => ({
  message_id: receipt.messageId, transaction_id: receipt.transactionId, queue_offset: receipt.offset,
  recall_handle: receipt.recallHandle,
});

const checker = {
  async check(half) {
    emit({ event: 'check', message: told(half) });
    return RESOLUTIONS[half.properties.get('check')];
  },
};

/** Tells of each message, and of the end of work on it; the first `fail` deliveries of a body fail. Who holds never ends. */
function listener(name, fail, hold, workMs) {
  const failures = new Map();
  return {
    async consume(delivered) {
      const what = told(delivered);
      const times = (failures.get(what.body) || 0) + 1;
      failures.set(what.body, times);
      emit({ event: 'message', consumer: name, done: times > fail, message: what });
      if (hold) await new Promise(() => {});
      if (workMs) {
        await new Promise(done => setTimeout(done, workMs));
        emit({ event: 'end', consumer: name, body: what.body });
      }
      return times > fail ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
    },
  };
}

async function start(request, client) {
  await client.startup();
  running.set(request.name, client);
}

const operations = {
  async producer(request) {
    await start(request, new Producer({
      ...options(request), topics: request.topic ? [ request.topic ] : [],
      ...(request.transactions ? { checker } : {}),
    }));
  },

  async send(request) {
    return sent(await running.get(request.producer).send(message(request)));
  },

  async send_transaction(request) {
    const producer = running.get(request.producer);
    const transaction = producer.beginTransaction();
    const receipt = await producer.send(message(request), transaction);
    if (request.local === 'COMMIT') await transaction.commit();
    if (request.local === 'ROLLBACK') await transaction.rollback();
    return sent(receipt);
  },

  async recall(request) {
    return (await running.get(request.producer).recallMessage(request.topic, request.handle)).messageId;
  },

  async simple(request) {
    await start(request, new SimpleConsumer({ ...consumerOptions(request), awaitDuration: request.wait_s * 1000 }));
  },

  async receive(request) {
    const found = await running.get(request.consumer).receive(request.count, request.invisible_s * 1000);
    return found.map(one => {
      const number = received.size + 1;
      received.set(number, one);
      return { ...told(one), number, received_ms: Date.now() };
    });
  },

  async ack(request) {
    await running.get(request.consumer).ack(received.get(request.number));
  },

  async change(request) {
    await running.get(request.consumer).changeInvisibleDuration(received.get(request.number), request.invisible_s * 1000);
  },

  async push(request) {
    await start(request, new PushConsumer({
      ...consumerOptions(request), messageListener: listener(request.name, request.fail || 0, request.hold, request.work_ms),
    }));
  },

  async stop({ name }) {
    const gone = running.get(name);
    running.delete(name);
    await gone.shutdown();
  },
};

async function answer(request) {
  try {
    const result = await operations[request.op](request);
    emit({ id: request.id, result: result === undefined ? null : result });
  } catch (error) { // whatever the client throws is for the test to judge
    const causes = [];
    for (let cause = error; cause; cause = cause.cause) causes.push(cause);
    const text = causes.map(cause => cause.message).join(', because of ');
    const code = causes.map(cause => cause.code).find(Boolean) || Number((/code: (\d+)/.exec(text) || [])[1]);
    emit({ id: request.id, error: { type: error.name, code: code || null, text } });
  }
}

const lines = readline.createInterface({ input: process.stdin });
lines.on('line', line => answer(JSON.parse(line)));
lines.on('close', () => process.exit(0));
emit({ event: 'ready' });
