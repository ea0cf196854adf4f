// The stock Go client for gRPC, `rocketmq-clients/golang/v5`, driven by JSON lines: requests on stdin, answers and events
// on stdout: `grpc_client ENDPOINT`. It has no call to recall a message, and an acknowledgement that the broker refuses
// is none to it: Ack says only whether it was answered.
//
// It decides nothing: what to send, when to fail and what must have come is the tests' business.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"sync"
	"time"

	stock "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

const requestTimeout = 10 * time.Second

type object = map[string]any

type request struct {
	ID           int            `json:"id"`
	Op           string         `json:"op"`
	Name         string         `json:"name"`
	Producer     string         `json:"producer"`
	Consumer     string         `json:"consumer"`
	Endpoint     string         `json:"endpoint"`
	TLS          bool           `json:"tls"`
	AccessKey    string         `json:"access_key"`
	SecretKey    string         `json:"secret_key"`
	Group        string         `json:"group"`
	Topic        string         `json:"topic"`
	Body         string         `json:"body"`
	Tag          string         `json:"tag"`
	Keys         string         `json:"keys"`
	Properties   map[string]any `json:"properties"`
	MessageGroup string         `json:"message_group"`
	DueMs        *int64         `json:"due_ms"`
	Transactions bool           `json:"transactions"`
	Local        string         `json:"local"`
	Expression   string         `json:"expression"`
	SQL          string         `json:"sql"`
	WaitS        int            `json:"wait_s"`
	Count        int32          `json:"count"`
	InvisibleS   int            `json:"invisible_s"`
	Number       int            `json:"number"`
	Fail         int            `json:"fail"`
	Hold         bool           `json:"hold"`
	WorkMs       int            `json:"work_ms"`
}

// client is what each of the three kinds can.
type client interface {
	Start() error
	GracefulStop() error
}

var (
	lock     sync.Mutex // of all that follows, and of the output
	running  = map[string]client{}
	received []*stock.MessageView
	starting sync.Mutex // EnableSsl is one for the whole process, and is read when a client dials
)

func main() {
	_ = os.Setenv(stock.CLIENT_LOG_ROOT, os.Getenv("HOME")+"/logs") // where it logs; otherwise below the root folder
	stock.ResetLogger()
	emit(object{"event": "ready"})
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			panic(err)
		}
		go answer(r)
	}
}

func emit(line object) {
	lock.Lock()
	defer lock.Unlock()
	_ = json.NewEncoder(os.Stdout).Encode(line)
}

func answer(r request) {
	result, err := perform(r)
	if err == nil {
		emit(object{"id": r.ID, "result": result})
		return
	}
	told := object{"type": fmt.Sprintf("%T", err), "text": err.Error(), "code": nil}
	if status, ok := stock.AsErrRpcStatus(err); ok {
		told["code"] = status.GetCode()
	}
	emit(object{"id": r.ID, "error": told})
}

func perform(r request) (any, error) {
	switch r.Op {
	case "producer":
		return nil, start(r, newProducer)
	case "send":
		return send(r, func(p stock.Producer, m *stock.Message) ([]*stock.SendReceipt, error) {
			return p.Send(context.Background(), m)
		})
	case "send_transaction":
		return sendTransaction(r)
	case "simple":
		return nil, start(r, newSimple)
	case "receive":
		return receive(r)
	case "ack":
		return nil, get[stock.SimpleConsumer](r.Consumer).Ack(context.Background(), message(r.Number))
	case "change":
		consumer := get[stock.SimpleConsumer](r.Consumer)
		return nil, consumer.ChangeInvisibleDuration(message(r.Number), seconds(r.InvisibleS))
	case "push":
		return nil, start(r, newPush)
	case "stop":
		stopped := get[client](r.Name)
		lock.Lock()
		delete(running, r.Name)
		lock.Unlock()
		return nil, stopped.GracefulStop()
	}
	return nil, errors.New("the Go client has no " + r.Op)
}

func seconds(count int) time.Duration {
	return time.Duration(count) * time.Second
}

func get[T any](name string) T {
	lock.Lock()
	defer lock.Unlock()
	return running[name].(T)
}

func message(number int) *stock.MessageView {
	lock.Lock()
	defer lock.Unlock()
	return received[number]
}

// ---- starting

func start(r request, make func(request) (client, error)) error {
	starting.Lock()
	defer starting.Unlock()
	stock.EnableSsl = r.TLS
	made, err := make(r)
	if err != nil {
		return err
	}
	if err := made.Start(); err != nil {
		return err
	}
	lock.Lock()
	defer lock.Unlock()
	running[r.Name] = made
	return nil
}

func config(r request) *stock.Config {
	endpoint := r.Endpoint
	if endpoint == "" {
		endpoint = os.Args[1]
	}
	return &stock.Config{
		Endpoint:      endpoint,
		ConsumerGroup: r.Group,
		Credentials:   &credentials.SessionCredentials{AccessKey: r.AccessKey, AccessSecret: r.SecretKey},
	}
}

// patient makes a client that waits as long for an answer as the other stock clients here do.
func patient(c *stock.Config, options ...stock.ClientOption) (stock.Client, error) {
	return stock.NewClient(c, append(options, stock.WithQueryRouteTimeout(requestTimeout))...)
}

func newProducer(r request) (client, error) {
	options := []stock.ProducerOption{stock.WithClientFunc(patient)}
	if r.Topic != "" {
		options = append(options, stock.WithTopics(r.Topic))
	}
	if r.Transactions {
		options = append(options, stock.WithTransactionChecker(&stock.TransactionChecker{
			Check: func(half *stock.MessageView) stock.TransactionResolution {
				emit(object{"event": "check", "message": told(half)})
				return map[string]stock.TransactionResolution{
					"COMMIT": stock.COMMIT, "ROLLBACK": stock.ROLLBACK, "UNKNOWN": stock.UNKNOWN,
				}[half.GetProperties()["check"]]
			},
		}))
	}
	return stock.NewProducer(config(r), options...)
}

func subscription(r request) map[string]*stock.FilterExpression {
	switch {
	case r.SQL != "":
		return map[string]*stock.FilterExpression{r.Topic: stock.NewFilterExpressionWithType(r.SQL, stock.SQL92)}
	case r.Expression != "":
		return map[string]*stock.FilterExpression{r.Topic: stock.NewFilterExpression(r.Expression)}
	}
	return map[string]*stock.FilterExpression{r.Topic: stock.SUB_ALL}
}

func newSimple(r request) (client, error) {
	return stock.NewSimpleConsumer(
		config(r),
		stock.WithSimpleAwaitDuration(seconds(r.WaitS)),
		stock.WithSimpleSubscriptionExpressions(subscription(r)),
	)
}

// newPush makes a consumer that tells of each message, and of the end of work on it; the first `fail` deliveries of a
// body fail. One that holds never comes to an end.
func newPush(r request) (client, error) {
	var counting sync.Mutex
	deliveries := map[string]int{}
	consume := func(delivered *stock.MessageView) stock.ConsumerResult {
		body := string(delivered.GetBody())
		counting.Lock()
		deliveries[body]++
		done := deliveries[body] > r.Fail
		counting.Unlock()
		emit(object{"event": "message", "consumer": r.Name, "done": done, "message": told(delivered)})
		if r.Hold {
			select {}
		}
		if r.WorkMs > 0 {
			time.Sleep(time.Duration(r.WorkMs) * time.Millisecond)
			emit(object{"event": "end", "consumer": r.Name, "body": body})
		}
		if done {
			return stock.SUCCESS
		}
		return stock.FAILURE
	}
	return stock.NewPushConsumer(
		config(r),
		stock.WithPushSubscriptionExpressions(subscription(r)),
		stock.WithPushMessageListener(&stock.FuncMessageListener{Consume: consume}),
	)
}

// ---- producing

func send(r request, call func(stock.Producer, *stock.Message) ([]*stock.SendReceipt, error)) (any, error) {
	m := &stock.Message{Topic: r.Topic, Body: []byte(r.Body)}
	if r.Tag != "" {
		m.SetTag(r.Tag)
	}
	if r.Keys != "" {
		m.SetKeys(r.Keys)
	}
	if r.MessageGroup != "" {
		m.SetMessageGroup(r.MessageGroup)
	}
	if r.DueMs != nil {
		m.SetDelayTimestamp(time.UnixMilli(*r.DueMs))
	}
	for name, value := range r.Properties {
		m.AddProperty(name, fmt.Sprint(value))
	}
	receipts, err := call(get[stock.Producer](r.Producer), m)
	if err != nil {
		return nil, err
	}
	return object{
		"message_id":     receipts[0].MessageID,
		"transaction_id": receipts[0].TransactionId,
		"queue_offset":   receipts[0].Offset,
	}, nil
}

func sendTransaction(r request) (any, error) {
	var transaction stock.Transaction
	sent, err := send(r, func(p stock.Producer, m *stock.Message) ([]*stock.SendReceipt, error) {
		transaction = p.BeginTransaction()
		return p.SendWithTransaction(context.Background(), m, transaction)
	})
	switch {
	case err != nil:
		return nil, err
	case r.Local == "COMMIT":
		err = transaction.Commit()
	case r.Local == "ROLLBACK":
		err = transaction.RollBack()
	}
	return sent, err
}

// ---- consuming

// receive returns messages, each with a number by which it is acknowledged and changed.
func receive(r request) (any, error) {
	consumer := get[stock.SimpleConsumer](r.Consumer)
	views, err := consumer.Receive(context.Background(), r.Count, seconds(r.InvisibleS))
	found := []object{}
	if status, ok := stock.AsErrRpcStatus(err); ok && status.GetCode() == int32(v2.Code_MESSAGE_NOT_FOUND) {
		return found, nil
	}
	if err != nil {
		return nil, err
	}
	lock.Lock()
	defer lock.Unlock()
	for _, view := range views {
		line := told(view)
		line["number"], line["received_ms"] = len(received), time.Now().UnixMilli()
		received = append(received, view)
		found = append(found, line)
	}
	return found, nil
}

func told(m *stock.MessageView) object {
	keys := append([]string{}, m.GetKeys()...)
	sort.Strings(keys)
	properties := m.GetProperties()
	if properties == nil {
		properties = map[string]string{}
	}
	line := object{
		"topic":         m.GetTopic(),
		"body":          string(m.GetBody()),
		"tag":           m.GetTag(),
		"keys":          keys,
		"message_id":    m.GetMessageId(),
		"born_ms":       m.GetBornTimestamp().UnixMilli(),
		"due_ms":        nil,
		"message_group": m.GetMessageGroup(),
		"attempt":       m.GetDeliveryAttempt(),
		"properties":    properties,
	}
	if due := m.GetDeliveryTimestamp(); due != nil {
		line["due_ms"] = due.UnixMilli()
	}
	return line
}
