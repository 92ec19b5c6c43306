// The package of Ollama, and its provider for the AI SDK.
import { jsonSchema, stepCountIs, streamText, tool } from "ai";
import { Ollama } from "ollama";
import { createOllama } from "ollama-ai-provider-v2";

const [url, model] = process.argv.slice(2);
const client = new Ollama({ host: url });
const found = {};
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};

found.models = (await client.list()).models.map((each) => each.model);
found.capabilities = (await client.show({ model })).capabilities;
found.generate = (await client.generate({ model, prompt: "[[say Generated.]]" })).response;

let text = "";
const messages = [{ role: "user", content: "[[say Streamed.]]" }];
for await (const part of await client.chat({ model, messages, stream: true })) {
  text += part.message.content;
}
found.chat = text;

const asked = await client.chat({
  model,
  messages: [{ role: "user", content: "[[call weather city=Rome]]" }],
  tools: [{ type: "function", function: { name: "weather", parameters } }],
});
const [call] = asked.message.tool_calls;
found.call = [call.function.name, call.function.arguments];

try {
  await client.chat({ model: "none", messages });
} catch (error) {
  found.none = error.status_code;
}

const counting = await client.generate({ model, prompt: "[[count]]", stream: true });
try {
  for await (const part of counting) {
    if (part.response) counting.abort();
  }
} catch (error) {
  found.aborted = error.name;
}

const provider = createOllama({ baseURL: `${url}/api` });
const result = streamText({
  model: provider(model),
  prompt: "[[call weather city=Paris]]",
  tools: {
    weather: tool({
      description: "The weather of a city",
      inputSchema: jsonSchema({ ...parameters, additionalProperties: false }),
      execute: async ({ city }) => `It rains in ${city}.`,
    }),
  },
  stopWhen: stepCountIs(3),
  maxRetries: 0,
  onError: ({ error }) => console.error(error),
});
found.provider = [(await result.steps).length, await result.text];
console.log(JSON.stringify(found));
