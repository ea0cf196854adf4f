'use strict';
// The stock JavaScript client, npm's `ali-ons`, driven by JSON lines: requests on stdin, answers and events on stdout.
// Runs with its packages in NODE_PATH: `node ali_ons.js NAME_SERVER`.
//
// It decides nothing: what to send, when to fail and what must have come is the tests' business.

const readline = require('readline');
const httpclient = require('urllib');
const { Consumer, Producer, Message } = require('ali-ons');

const nameSrv = process.argv[2];
const running = new Map();
const failures = new Map();
const quiet = { info() {}, debug() {}, warn() {}, error(...told) { console.error(...told); } };

function emit(line) {
  process.stdout.write(JSON.stringify(line) + '\n');
}

const options = name => ({
  httpclient, nameSrv, logger: quiet, clientIP: '127.0.0.1', instanceName: name,
  accessKeyId: process.env.STOCK_ACCESS_KEY || 'nobody', accessKeySecret: process.env.STOCK_SECRET_KEY || 'nothing',
  pollNameServerInteval: 1000, heartbeatBrokerInterval: 2000, rebalanceInterval: 1000, persistConsumerOffsetInterval: 1000,
});

function told(message) {
  return {
    topic: message.topic,
    body: message.body.toString(),
    tag: message.tags || null,
    keys: message.keys || null,
    message_id: message.msgId,
    queue_id: message.queueId,
    queue_offset: Number(message.queueOffset),
    born_ms: Number(message.bornTimestamp),
    store_ms: Number(message.storeTimestamp),
    reconsume_times: message.reconsumeTimes,
    properties: message.properties,
  };
}

const operations = {
  async producer({ name, group }) {
    const producer = new Producer({ ...options(name), producerGroup: group, sendMsgTimeout: 20000 });
    producer.on('error', error => console.error(error));
    await producer.ready();
    running.set(name, producer);
  },

  async send(request) {
    const message = new Message(request.topic, request.tag, request.body);
    if (request.tag === undefined) delete message.properties.TAGS;
    if (request.keys) message.keys = [ request.keys ];
    if (request.level) message.delayTimeLevel = request.level;
    if (request.timer === '__STARTDELIVERTIME') {
      message.setStartDeliverTime(request.timer_value);
    } else if (request.timer) {
      message.properties[request.timer] = String(request.timer_value);
    }
    if (request.sharding) message.shardingKey = request.sharding;
    Object.assign(message.properties, request.properties);
    const sent = await running.get(request.producer).send(message);
    return {
      status: sent.sendStatus, message_id: sent.msgId, queue_offset: Number(sent.queueOffset),
      queue_id: sent.messageQueue.queueId, transaction_id: sent.transactionId,
    };
  },

  async consumer(request) {
    const { name, group, topic, fail = 0 } = request;
    const consumer = new Consumer({
      ...options(name), consumerGroup: group, isBroadcast: Boolean(request.broadcast),
      consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET',
      ...(request.max_reconsume_times === undefined ? {} : { maxReconsumeTimes: request.max_reconsume_times }),
    });
    consumer.on('error', error => console.error(String(error)));
    const filter = request.sql ? { expressionType: 'SQL92', subString: request.sql } : request.expression;
    await consumer.ready();
    consumer.subscribe(topic, filter, async message => {
      const body = message.body.toString();
      const times = (failures.get(name + ' ' + body) || 0) + 1;
      failures.set(name + ' ' + body, times);
      emit({ event: 'message', consumer: name, done: times > fail, message: told(message) });
      if (times <= fail) throw new Error('not now');
    });
    running.set(name, consumer);
  },

  async stop({ name }) {
    const gone = running.get(name);
    running.delete(name);
    await gone.close();
  },
};

async function answer(request) {
  try {
    const result = await operations[request.op](request);
    emit({ id: request.id, result: result === undefined ? null : result });
  } catch (error) { // whatever the client throws is for the test to judge
    emit({ id: request.id, error: { type: error.name, code: error.code, text: error.message } });
  }
}

const lines = readline.createInterface({ input: process.stdin });
lines.on('line', line => answer(JSON.parse(line)));
lines.on('close', () => process.exit(0));
emit({ event: 'ready' });
