// Command porcupine reads operations on messages, a JSON object a line, and checks with Porcupine that they are
// linearizable: each operation takes effect at one moment between its call and its return. Every message is an object
// of its own. It prints the history of each message for which there is no such order, then the counts. Its status is 1
// if there is such a message, or one whose history is undecided after a minute.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

// An Op is one operation. Call and Return are nanoseconds since 1970. An operation without an answer has the outcome
// "unknown": it takes effect at any time after its call, or never.
type Op struct {
	Message string `json:"message"`
	Kind    string `json:"kind"`
	Outcome string `json:"outcome"`
	DueMs   int64  `json:"due_ms"`   // requested, found by a look-up, or of the released row
	StoreMs int64  `json:"store_ms"` // of a released row
	Call    int64  `json:"call_ns"`
	Return  int64  `json:"return_ns"`
}

// A State is that of one message. Of a pending message it has the due time, or a lower bound: a reschedule that comes
// late makes a message due at once, and if its answer is lost, only the requested time is known.
type State struct {
	Phase     string
	DueMs     int64
	IsAtLeast bool
}

func (state State) isDue(dueMs int64) bool {
	return dueMs == state.DueMs || state.IsAtLeast && dueMs > state.DueMs
}

const unknown = "unknown"

// Step returns whether a message in this state gives this outcome, and its next state.
func Step(state State, op Op) (bool, State) {
	pending := state.Phase == "pending"
	switch op.Kind {
	case "send":
		return state.Phase == "not_found", State{"pending", op.DueMs, false}
	case "cancel":
		return settle(state, op, "cancelled", State{"cancelled", 0, false})
	case "reschedule":
		return settle(state, op, "rescheduled", State{"pending", op.DueMs, op.Outcome == unknown})
	case "release":
		return pending && state.isDue(op.DueMs) && op.StoreMs >= op.DueMs, State{"released", 0, false}
	case "look-up":
		return op.Outcome == unknown || op.Outcome == state.Phase && (!pending || state.isDue(op.DueMs)), state
	}
	panic("no such operation: " + op.Kind)
}

// Settle changes a pending message. Otherwise the verdict names the state, and nothing changes.
func settle(state State, op Op, verdict string, next State) (bool, State) {
	if state.Phase == "pending" {
		return op.Outcome == verdict || op.Outcome == unknown, next
	}
	names := map[string]string{"cancelled": "already_cancelled", "released": "released", "not_found": "not_found"}
	return op.Outcome == names[state.Phase] || op.Outcome == unknown, state
}

var model = porcupine.Model{
	Init: func() interface{} { return State{"not_found", 0, false} },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		return first(Step(state.(State), input.(Op)))
	},
}

func first(ok bool, state State) (bool, interface{}) { return ok, state }

func read(lines *bufio.Scanner) (map[string][]porcupine.Operation, map[string]int, error) {
	histories, counts := map[string][]porcupine.Operation{}, map[string]int{}
	for lines.Scan() {
		var op Op
		if err := json.Unmarshal(lines.Bytes(), &op); err != nil {
			return nil, nil, err
		}
		counts[op.Kind]++
		if op.Outcome == unknown {
			counts[unknown]++
			op.Return = math.MaxInt64
			if op.Kind == "look-up" {
				continue // it says nothing
			}
		}
		histories[op.Message] = append(histories[op.Message], porcupine.Operation{Input: op, Call: op.Call, Return: op.Return})
	}
	return histories, counts, lines.Err()
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	histories, counts, err := read(lines)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	wrong := 0
	for message, history := range histories {
		result := porcupine.CheckOperationsTimeout(model, history, time.Minute)
		if result == porcupine.Ok {
			continue
		}
		wrong++
		fmt.Printf("%s is not linearizable: %s\n", message, result)
		sort.Slice(history, func(i, j int) bool { return history[i].Call < history[j].Call })
		for _, each := range history {
			line, _ := json.Marshal(each.Input)
			fmt.Printf("  %s\n", line)
		}
	}
	counts["messages"], counts["wrong"] = len(histories), wrong
	line, _ := json.Marshal(counts)
	fmt.Println(string(line))
	if wrong > 0 {
		os.Exit(1)
	}
}
