// The three SDKs of npm at once, each stream with a prompt that is answered late.
// They have no timeout of their own between chunks; that of Node's fetch is set on its dispatcher.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import Anthropic from "@anthropic-ai/sdk";
import { streamText } from "ai";
import OpenAI from "openai";
import { Agent } from "undici";

const [url, model, milliseconds] = process.argv.slice(2);
const timeout = Number(milliseconds);
const dispatcher = new Agent({ headersTimeout: timeout, bodyTimeout: timeout });
const prompt = "[[slow At last.]]";
const messages = [{ role: "user", content: prompt }];

const options = { apiKey: "none", maxRetries: 0, timeout, fetchOptions: { dispatcher } };
const openai = new OpenAI({ baseURL: `${url}/v1`, ...options });
const anthropic = new Anthropic({ baseURL: url, ...options });

const provider = {
  baseURL: `${url}/v1`,
  apiKey: "none",
  fetch: (input, init) => fetch(input, { ...init, dispatcher }),
};
const aiOpenAI = createOpenAI(provider);
const aiAnthropic = createAnthropic(provider);
const ask = (languageModel) => streamText({ model: languageModel, prompt, maxRetries: 0 }).text;

const streams = {
  openaiChat: openai.chat.completions.stream({ model, messages }).finalContent(),
  openaiResponses: openai.responses
    .stream({ model, input: prompt })
    .finalResponse()
    .then((response) => response.output_text),
  anthropic: anthropic.messages.stream({ model, max_tokens: 100, messages }).finalText(),
  aiChat: ask(aiOpenAI.chat(model)),
  aiResponses: ask(aiOpenAI(model)),
  aiMessages: ask(aiAnthropic(model)),
};
const ends = await Promise.allSettled(Object.values(streams));
const found = ends.map((end) => end.value ?? String(end.reason));
console.log(JSON.stringify(Object.fromEntries(Object.keys(streams).map((key, i) => [key, found[i]]))));
