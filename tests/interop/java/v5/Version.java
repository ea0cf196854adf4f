import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/** What only this version does so: 5.x has timers, recall and pop. */
final class Version {
    private Version() {
    }

    static void delay(Message message, String property, long value) {
        switch (property) {
            case "TIMER_DELAY_SEC": message.setDelayTimeSec(value); break;
            case "TIMER_DELAY_MS": message.setDelayTimeMs(value); break;
            case "TIMER_DELIVER_MS": message.setDeliverTimeMs(value); break;
            default: throw new IllegalArgumentException(property);
        }
    }

    static void broadcast(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    static void serverRebalance(DefaultMQPushConsumer consumer) {
        consumer.setClientRebalance(false); // the broker's answer then says pull or pop
    }

    static String recall(DefaultMQProducer producer, String topic, String handle) throws Exception {
        return producer.recallMessage(topic, handle);
    }

    static String recallHandle(SendResult result) {
        return result.getRecallHandle();
    }
}
