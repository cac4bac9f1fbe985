// Vercel's AI SDK with its three providers: openai-compatible (chat), openai (responses), anthropic (messages).

import { readFileSync } from "node:fs";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const { URL: url, KEY: key, MODEL: name, SYSTEM: system, ENVIRONMENT: home } = process.env;
const baseURL = url + "/v1";
const providers = {
  chat: () => createOpenAICompatible({ name: "radixkv", baseURL, apiKey: key, includeUsage: true })(name),
  responses: () => createOpenAI({ baseURL, apiKey: key })(name),
  messages: () => createAnthropic({ baseURL, apiKey: key })(name),
};
const packages = { chat: "openai-compatible", responses: "openai", messages: "anthropic" };
const model = providers[process.argv[2]]();
const say = (fields) => console.log(JSON.stringify({ ...fields, at: Date.now() / 1000 }));
const versionOf = (part) => JSON.parse(readFileSync(`${home}/node_modules/${part}/package.json`)).version;

say({ version: `${versionOf("ai")}, ${versionOf("@ai-sdk/" + packages[process.argv[2]])}` });
const messages = [{ role: "user", content: "Tell me about rivers." }];
const first = await generateText({ model, system, messages, maxRetries: 0 });
say({ turn: first.text });
messages.push(...first.response.messages, { role: "user", content: "And about lakes?" });
const second = streamText({ model, system, messages, maxRetries: 0, onError: ({ error }) => { throw error; } });
let text = "";
for await (const piece of second.textStream) text += piece;
if (!text) throw new Error("the streamed turn has no text");
say({ turn: text });

const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string(), days: z.number().int() }),
  execute: async (input) => {
    say({ called: input });
    return "It is sunny.";
  },
});
const forced = await generateText({
  model,
  prompt: "What is the weather in Paris?",
  tools: { weather },
  toolChoice: { type: "tool", toolName: "weather" },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "auto" } : {}),
  maxRetries: 0,
});
say({ turn: forced.text });
